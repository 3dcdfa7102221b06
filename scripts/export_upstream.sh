#!/bin/sh
# export_upstream.sh CHECKOUT [--prefix sam/] [--force]: one upstream branch per patch.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
exec "${SAM_PYTHON:-python3}" "$here/patchtool.py" export "$@"
