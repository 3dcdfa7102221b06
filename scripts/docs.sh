#!/bin/bash
# docs.sh: builds the documents as a site; see --help.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SAM_DOCS_VENV:-$root/.venv-docs}
pins=$root/requirements/docs.txt
site=$root/build/docs

usage() {
    cat <<'EOT'
usage: scripts/docs.sh

Builds docs/, the READMEs and CONTRIBUTING into build/docs: open index.html there, no server and
no network needed. A link or an anchor that leads nowhere is an error, and so is a page that would
fetch something from elsewhere. Makes .venv-docs on first use (130 MB, from the package index).

environment: SAM_DOCS_VENV  where that is (default: .venv-docs in the checkout)
             PYTHON         interpreter to make it with (default: python3.11, else python3)
exit codes:  0 built; 1 the documents or the installation failed; 2 wrong usage
EOT
}

case ${1:-} in
    -h | --help) usage; exit 0 ;;
    "") ;;
    *) usage >&2; exit 2 ;;
esac

stamp=$(cksum <"$pins")
if [ "$(cat "$venv/.sam-stamp" 2>/dev/null)" != "$stamp" ]; then
    python=${PYTHON:-$(command -v python3.11 || command -v python3)}
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "$pins" >&2
    printf '%s\n' "$stamp" >"$venv/.sam-stamp"
fi
cd "$root"
rm -rf "$site"
"$venv/bin/python" -m sphinx -q -W --keep-going -E -c docs -d build/docs-cache . "$site"
printf '<!doctype html><title>sam</title><meta http-equiv="refresh" content="0; url=docs/README.html">\n' \
    >"$site/index.html"
fetched=$(grep -rlE '<(script|img|iframe)[^>]* src="(https?:)?//|<link[^>]* href="(https?:)?//' \
    --include='*.html' "$site" || true)
if [ -n "$fetched" ]; then
    printf 'docs: these pages fetch something from elsewhere:\n%s\n' "$fetched" >&2
    exit 1
fi
echo "docs: $site/index.html"
