#!/bin/bash
# setup_langgraph.sh: LangGraph in an environment of its own, for tests/e2e/test_docs_live.py.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SAM_VENV:-$root/.venv}
target=$root/.cache/langgraph
pins=$root/requirements/langgraph.txt

case ${1:-} in
    -h | --help)
        cat <<'EOT'
usage: scripts/setup_langgraph.sh

Makes .cache/langgraph (130 MB), an environment with LangGraph and OpenAI's client, in which the
tests run the cookbook's LangGraph recipe. Does nothing when it is there.

environment: SAM_VENV   the environment whose Python is used (default: .venv in the checkout)
exit codes:  0 ready; 1 the installation failed
EOT
        exit 0
        ;;
esac
stamp=$(cksum <"$pins")
if [ "$(cat "$target/.sam-stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$target"
    "$venv/bin/python" -m venv "$target"
    "$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
        -r "$pins" >&2
    printf '%s\n' "$stamp" >"$target/.sam-stamp"
fi
echo "langgraph: $target is ready"
