#!/usr/bin/env bash
# Run the tests, installing what they need first.
#
#   scripts/test.sh            unit, model, patch-tool, contract and e2e tests (CI's set)
#   scripts/test.sh --fast     no server is started: seconds
#   scripts/test.sh --full     also the slow extra server configurations
#   scripts/test.sh --client   tests/client only: the real openJiuwen client (2 GB more, once)
#   scripts/test.sh ... ARGS   ARGS go to pytest, e.g. -k evict
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; }

mode=ci
case "${1:-}" in
  --fast) mode=fast; shift ;;
  --full) mode=full; shift ;;
  --client) mode=client; shift ;;
  -h | --help) usage; exit 0 ;;
esac

scripts/setup_env.sh --tests
venv="${SAM_VENV:-.venv}"
python="$venv/bin/python"
SAM_PYTHON="$python" scripts/apply_patches.sh apply
"$python" scripts/lint_patches.py

skips() { echo "test.sh: without $1 (see above); what needs it is skipped" >&2; }
if [[ $mode != client ]]; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
    -r requirements/sim-check.txt || skips kvcache-simulator
fi
if [[ $mode = ci || $mode = full ]]; then
  SAM_PYTHON="$python" scripts/pool.sh install || skips Mooncake
  SAM_PYTHON="$python" scripts/pool.sh router || skips "a router"
  SAM_PYTHON="$python" scripts/browser.sh install || skips Chromium
  scripts/setup_tracing.sh || skips OpenTelemetry
  scripts/setup_langgraph.sh || skips LangGraph
fi

case "$mode" in
  fast) selection=(-m "not e2e") ;;
  ci) selection=(-m "not slow") ;;
  full) selection=() ;;
  client)
    scripts/setup_client_env.sh
    export SAM_CLIENT_TESTS=1
    selection=(tests/client)
    ;;
esac
exec "$python" -m pytest "${selection[@]}" "$@"
