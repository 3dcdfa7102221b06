#!/usr/bin/env bash
# What the tests of the live page need: Chromium and Playwright's Python package.
#
#   scripts/browser.sh install   Debian's chromium (as root), playwright into the environment
#   scripts/browser.sh check     exit 1, and say what, if one is missing
#
# Without them those tests are skipped. No browser is downloaded: Debian's is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${SAM_PYTHON:-${SAM_VENV:-.venv}/bin/python}"
playwright="playwright>=1.49"

has_chromium() { command -v chromium >/dev/null; }
has_playwright() { "$python" -c 'import playwright.sync_api' 2>/dev/null; }
say() { printf 'browser: %s\n' "$*" >&2; }

case "${1:-}" in
  install)
    if ! has_chromium; then
      if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "chromium is missing; remedy: apt-get install chromium fonts-dejavu-core"
        exit 1
      fi
      say "installing chromium"
      export DEBIAN_FRONTEND=noninteractive
      apt-get update -qq >&2
      apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
    fi
    has_playwright || "$python" -m pip install --disable-pip-version-check --no-input -q \
      "$playwright" >&2
    ;;
  check)
    has_chromium || { say "no chromium; remedy: scripts/browser.sh install"; exit 1; }
    has_playwright || { say "no playwright; remedy: scripts/browser.sh install"; exit 1; }
    ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
