"""Who owns a session: the caller's API key and cache namespace, as one opaque string.

Must never put a key or salt in clear into a name that is logged or shown.
"""

from __future__ import annotations

import hashlib
from typing import Any

ANONYMOUS = "anonymous"
_NAMESPACE = "/ns-"
_DIGEST_BYTES = 8


def _digest(*parts: object) -> str:
    text = "\x00".join(repr(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def tenant_of(raw_request: Any, cache_salt: object = None, extra_key: object = None) -> str:
    """`anonymous` or `key-<digest>`, with `/ns-<digest>` where a salt or extra key is set.

    `raw_request` is a Starlette request, or None for calls inside the process.
    """
    header = raw_request.headers.get("authorization") if raw_request is not None else None
    scheme, _, key = (header or "").partition(" ")
    if scheme.lower() != "bearer":
        key = header
    owner = f"key-{_digest(key.strip())}" if key else ANONYMOUS
    if cache_salt or extra_key:
        owner += f"{_NAMESPACE}{_digest(cache_salt or '', extra_key or '')}"
    return owner


def client_of(tenant: str) -> str:
    """Whose flood it is: the API key, whatever namespaces it invents; without keys the
    namespace is all there is to tell callers apart."""
    key = tenant.partition(_NAMESPACE)[0]
    return tenant if key == ANONYMOUS else key
