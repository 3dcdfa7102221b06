"""Files of the live page: what is served at `/sam/`, and under which headers.

Owns the list of files and the content security policy. Must never serve anything that is not
in the list, nor allow a script, style or connection from elsewhere. Knows no server.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

import msgspec

FILES = (
    "page.css",
    "main.js",
    "charts.js",
    "feed.js",
    "format.js",
    "story.js",
    "tree.js",
    "vendor/preact.mjs",
    "vendor/hooks.mjs",
    "vendor/htm.mjs",
    "icon.svg",
)
INDEX = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class WebFile(msgspec.Struct, frozen=True):
    """One file with the headers to send."""

    body: bytes
    media_type: str
    headers: dict[str, str]


def find(name: str) -> WebFile | None:
    """The file of that name below `/sam/`; the page itself if there is none; else None."""
    if not name:
        return _load(INDEX)
    return _load(name) if name in FILES else None


@cache
def _load(name: str) -> WebFile:
    body = files(__name__).joinpath(name).read_bytes()
    return WebFile(
        body,
        _TYPES[name.rpartition(".")[2]],
        {
            "cache-control": "no-cache",
            "content-security-policy": POLICY,
            "cross-origin-opener-policy": "same-origin",
            "etag": f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"',
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )
