#!/bin/bash
# quickstart.sh [options] | serve [options]: from nothing to a comparison, or a server to try.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SAM_VENV:-$root/.venv}

usage() {
    cat <<'EOF'
usage: scripts/quickstart.sh [options]          compare stock and sam on one agent swarm
       scripts/quickstart.sh serve [options]    run a server with sam until Ctrl-C

Makes the environment (scripts/setup_env.sh), applies and proves the patches
(scripts/apply_patches.sh), builds a small random-weight model, then does the above. Everything
is reused the next time. The options below come from the second stage.

EOF
}

case " $* " in
    *" -h "* | *" --help "*)
        usage
        if [ ! -x "$venv/bin/python" ]; then
            echo "(run it once without --help to see the options: .venv is not there yet)"
            exit 0
        fi
        exec "$venv/bin/python" -m sam.bench.quickstart "$@"
        ;;
esac

trap 'exit 130' INT TERM
"$root/scripts/setup_env.sh" >&2
export SAM_PYTHON=$venv/bin/python
echo "patches: applying and proving" >&2
"$root/scripts/apply_patches.sh" apply >&2
"$root/scripts/apply_patches.sh" check >&2

command=()
if [ "${1:-}" = serve ]; then
    command=(serve)
    shift
fi
exec "$venv/bin/python" -m sam.bench.quickstart ${command[@]+"${command[@]}"} \
    --workdir "$root/.cache/quickstart" "$@"
