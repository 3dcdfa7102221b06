#!/usr/bin/env bash
# Fetch the live page's libraries from the npm registry into sam/web/vendor/. Needs npm.
#
#   scripts/vendor_web.sh          write them
#   scripts/vendor_web.sh --check  exit 1 if what is there differs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preact=11.2.0
htm=3.1.1
target=sam/web/vendor
fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT

fetch() { # NAME VERSION
    mkdir "$fetched/$1"
    (cd "$fetched" && npm pack --silent "$1@$2" >/dev/null)
    tar xzf "$fetched/$1-$2.tgz" -C "$fetched/$1" --strip-components=1
}

fetch preact "$preact"
fetch htm "$htm"
new="$fetched/new"
mkdir "$new"
sed 's,//# sourceMappingURL.*,,' "$fetched/preact/dist/preact.mjs" >"$new/preact.mjs"
sed -e 's,//# sourceMappingURL.*,,' -e 's,from"preact",from"./preact.mjs",' \
    "$fetched/preact/hooks/dist/hooks.mjs" >"$new/hooks.mjs"
cp "$fetched/htm/mini/index.mjs" "$new/htm.mjs"
cp "$fetched/preact/LICENSE" "$new/LICENSE.preact"
cp "$fetched/htm/LICENSE" "$new/LICENSE.htm"

if [ "${1:-}" = --check ]; then
    for file in "$new"/*; do cmp "$file" "$target/$(basename "$file")"; done
else
    cp "$new"/* "$target/"
fi
