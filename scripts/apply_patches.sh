#!/bin/sh
# apply_patches.sh [apply|status|check|revert] [options]; see --help.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
if [ -n "${SAM_PYTHON:-}" ]; then
    python=$SAM_PYTHON
elif [ -x "$here/../.venv/bin/python" ]; then
    python=$here/../.venv/bin/python
else
    python=python3
fi
exec "$python" "$here/patchtool.py" "$@"
