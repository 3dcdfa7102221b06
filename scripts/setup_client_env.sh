#!/bin/bash
# setup_client_env.sh [VERSION...]: the real openJiuwen client, one environment per version.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
envs=${SAM_CLIENT_ENVS:-$root/.cache/client}
constraints=$root/requirements/client.txt
versions=(0.1.19.post2 0.1.17.post2)

usage() {
    cat <<'EOF'
usage: scripts/setup_client_env.sh [VERSION...]

Makes one virtual environment per version of openjiuwen, for tests/client: by default
0.1.19.post2 and 0.1.17.post2, about 0.9 GB each, no torch. Needs Python 3.11 to 3.13 with venv
and a package index. Does nothing when they are there; finishes what an interrupted run left.

environment: SAM_CLIENT_ENVS   where to put them (default: .cache/client in the checkout)
             PYTHON            interpreter to make them with (default: python3.11, else python3)
exit codes:  0 ready; 1 an installation failed; 2 the machine lacks something
EOF
}

say() { printf 'client: %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "no Python 3.11 to 3.13 with venv was found"
    say "remedy: install it (Debian 12: apt-get install python3 python3-venv), or set PYTHON"
    exit 2
}

install_version() {
    local version=$1 venv=$envs/openjiuwen-$1 stamp
    stamp="$version $(cksum <"$constraints")"
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.sam-stamp" 2>/dev/null)" = "$stamp" ]; then
        say "$venv is ready"
        return
    fi
    mkdir -p "$envs"
    rm -f "$venv/.sam-stamp"
    say "installing openjiuwen $version in $venv (about 0.9 GB)"
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet \
        -c "$constraints" "openjiuwen==$version" >&2 || {
        say "installation failed; run this again to go on from here"
        exit 1
    }
    (cd "$venv" && bin/python -c 'import openjiuwen.core.foundation.llm' >/dev/null) || {
        say "openjiuwen $version cannot be imported; remove $venv and run this again"
        exit 1
    }
    printf '%s\n' "$stamp" >"$venv/.sam-stamp"
    say "$venv is ready"
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
esac
[ $# -eq 0 ] || versions=("$@")
trap 'say "interrupted; run this again to go on from here"; exit 130' INT TERM
mkdir -p "$envs"
if command -v flock >/dev/null; then
    exec 9>"$envs/.setup.lock"
    flock 9
fi
for version in "${versions[@]}"; do
    install_version "$version"
done
