#!/bin/bash
# soak.sh [options]: random hints at full load, then the books are checked; see --help.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SAM_VENV:-$root/.venv}

case " $* " in
    *" -h "* | *" --help "*)
        [ -x "$venv/bin/python" ] || { echo "run scripts/setup_env.sh first"; exit 2; }
        exec "$venv/bin/python" -m sam.bench.soak --help
        ;;
esac
trap 'exit 130' INT TERM
"$root/scripts/setup_env.sh" >&2
SAM_PYTHON=$venv/bin/python "$root/scripts/apply_patches.sh" apply >&2
exec "$venv/bin/python" -m sam.bench.soak --workdir "$root/.cache/soak" "$@"
