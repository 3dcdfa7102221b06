#!/bin/bash
# setup_env.sh [--tests]: makes the environment that everything here runs in; see --help.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SAM_VENV:-$root/.venv}
torch_pins=(torch==2.14.1 torchvision==0.29.1)
engine_pin=sglang==0.5.23
test_pins=("pytest>=8" "pytest-timeout>=2.3" "pytest-rerunfailures>=15" "hypothesis>=6.100")
needed_gib=8
probe=$root/scripts/envprobe.py

usage() {
    cat <<'EOF'
usage: scripts/setup_env.sh [--tests]

Makes .venv: torch, SGLang without its GPU kernel packages, the pinned rest
(requirements/cpu.txt), and this package from the checkout. Needs Python 3.11 or newer with
venv, about 8 GB of disk, and a package index. Does nothing, in under a second, when all of it
is there; finishes what an interrupted run left.

  --tests    also install what the tests need

environment: SAM_VENV    where to put it (default: .venv in the checkout)
             PYTHON      interpreter to make it with (default: python3.11, else python3)
exit codes:  0 ready; 1 an installation failed; 2 the machine lacks something
EOF
}

say() { printf 'setup: %s\n' "$*" >&2; }
lacks() { say "$1"; say "remedy: $2"; exit 2; }

with_tests=""
for argument in "$@"; do
    case $argument in
        --tests) with_tests=--tests ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done

probe() { # COMMAND: ask the environment's interpreter, without importing anything heavy
    "$venv/bin/python" -I "$probe" "$1" "$root" "$with_tests" "${torch_pins[@]}" "$engine_pin"
}

is_ready() { [ -x "$venv/bin/python" ] && probe ready 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    lacks "no Python 3.11 or newer was found" \
        "install it (Debian 12: apt-get install python3 python3-venv), or set PYTHON"
}

make_venv() {
    local python=$1
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        lacks "$python has no venv module" "apt-get install python3-venv"
    if [ -d "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] &&
        [ -n "$(find "$venv" -mindepth 1 -maxdepth 1 ! -name '.sam-*' -print -quit)" ]; then
        lacks "$venv is there and is not a virtual environment" "move it away, or set SAM_VENV"
    fi
    say "creating $venv with $("$python" --version 2>&1)"
    "$python" -m venv "$venv" || lacks "venv could not be made in $venv" \
        "check the message above; Debian 12: apt-get install python3-venv"
}

check_disk() {
    local free_kib
    free_kib=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge $((needed_gib * 1024 * 1024)) ] ||
        lacks "$venv needs about $needed_gib GiB and $((free_kib / 1024 / 1024)) GiB are free" \
            "free some space, or set SAM_VENV to a place that has it"
}

pip_install() { # STEP WHAT ARGUMENTS...
    say "[$1] $2"
    shift 2
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >&2 || {
        say "installation failed; run this again to go on from here"
        exit 1
    }
}

install_all() {
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        make_venv "$(find_python)"
    fi
    probe unstamp
    probe has-engine 2>/dev/null || check_disk
    probe heal
    pip_install 1/4 "torch (the long one: several GB)" "${torch_pins[@]}"
    pip_install 2/4 "SGLang, without its GPU kernel packages" --no-deps "$engine_pin"
    pip_install 3/4 "pinned packages (what pip says sglang misses is meant to be missing)" -r "$root/requirements/cpu.txt" \
        ${with_tests:+"${test_pins[@]}"}
    pip_install 4/4 "this package, from the checkout" --no-deps -e "$root"
    say "importing SGLang once"
    "$venv/bin/python" -c 'import sglang.srt.server_args, sam' || {
        say "SGLang cannot be imported in $venv; remove that folder and run this again"
        exit 1
    }
    probe stamp
}

say_accelerator() {
    [ -e /dev/nvidiactl ] || [ -e /dev/davinci_manager ] || return 0
    say "an accelerator is here; this environment is the CPU recipe for development and tests."
    say "To serve on it, see 'On an accelerator' in README.md (pip install -e '.[cuda]' or '.[npu]')."
}

main() {
    [ -f "$root/requirements/cpu.txt" ] ||
        lacks "requirements/cpu.txt is missing" "restore it from the repository"
    if is_ready; then
        say "$venv is ready"
        return
    fi
    say_accelerator
    mkdir -p "$venv"
    if command -v flock >/dev/null; then
        exec 9>"$venv/.sam-setup.lock"
        flock -n 9 || { say "another setup is at work in $venv; waiting"; flock 9; }
        if is_ready; then
            say "$venv is ready"
            return
        fi
    fi
    install_all
    say "$venv is ready"
}

trap 'say "interrupted; run this again to go on from here"; exit 130' INT TERM
main
