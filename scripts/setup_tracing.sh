#!/bin/bash
# setup_tracing.sh: OpenTelemetry beside the environment, for tests/e2e/test_tracing.py.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SAM_VENV:-$root/.venv}
target=$root/.cache/tracing
pins=$root/requirements/tracing.txt

case ${1:-} in
    -h | --help)
        cat <<'EOT'
usage: scripts/setup_tracing.sh

Puts what SGLang's --enable-trace needs into .cache/tracing (28 MB): a server whose PYTHONPATH names
that folder can trace, and nothing else sees these packages. Does nothing when they are there.

environment: SAM_VENV   the environment whose pip is used (default: .venv in the checkout)
exit codes:  0 ready; 1 the installation failed
EOT
        exit 0
        ;;
esac
stamp=$(cksum <"$pins")
if [ "$(cat "$target/.sam-stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$target"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        --target "$target" -r "$pins" >&2
    printf '%s\n' "$stamp" >"$target/.sam-stamp"
fi
echo "tracing: $target is ready"
