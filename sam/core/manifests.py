"""What it takes to bring a session back when no tree holds anything of it.

Owns the format in which a session's tokens lie in a pool beside its pages, and the bounded
store of the newest one per session. Must never trust what it reads: anything foreign, stale
or damaged is a `ManifestMiss` with its reason, never a wrong token. Must never put a tenant
or session id into a name: those are digests.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from sam.core.sessions import SessionKey

MAGIC = b"SAMM"
FORMAT = 1
KEY_PREFIX = "session-"
MAX_TOKENS = 1 << 22
MAX_BYTES = 1 << 24
"""Of an encoded manifest; what it says of itself is checked before memory is taken."""

_TOKEN_BYTES = 4
_HEADER_BYTES = len(MAGIC) + 1 + 4


class MissReason(StrEnum):
    """Why a manifest is of no use here."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    TOO_LARGE = "too_large"
    FORMAT = "format"
    OWNER = "owner"
    HASH_SCHEME = "hash_scheme"
    PAGE_SIZE = "page_size"
    MODEL = "model"
    LAYOUT = "layout"


class ManifestMiss(Exception):
    """No usable manifest; `reason` says why."""

    def __init__(self, reason: MissReason) -> None:
        self.reason = reason
        super().__init__(reason.value)


class PoolFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must agree for pages of a pool to mean the same KV.

    `hash_scheme`: how page keys follow from tokens. `layout`: dtype and order of the bytes.
    """

    hash_scheme: str
    page_size: int
    model: str
    layout: str


class BranchTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a session's branch: int32 in native byte order, and their namespace.

    `time_s`: message time at which they were known. `n_shared_pages`: leading pages that
    may be somebody else's as well.
    """

    token_ids: bytes
    extra_key: str | None = None
    cache_salt: str | None = None
    time_s: float = 0.0
    n_shared_pages: int = 0

    def __len__(self) -> int:
        return len(self.token_ids) // _TOKEN_BYTES

    def first(self, n_tokens: int) -> BranchTokens:
        """The same branch, cut after `n_tokens`."""
        head = self.token_ids[: n_tokens * _TOKEN_BYTES]
        return msgspec.structs.replace(self, token_ids=head)


class _Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    owner: str
    fingerprint: PoolFingerprint
    n_tokens: int
    extra_key: str | None
    cache_salt: str | None
    time_s: float
    n_shared_pages: int
    deflated: bytes


def owner_digest(key: SessionKey) -> str:
    """Opaque name of a tenant's session: 32 hex digits."""
    tenant, session_id = (part.encode() for part in key)
    parts = len(tenant).to_bytes(8, "little") + tenant + session_id
    return hashlib.blake2b(parts, digest_size=16, person=b"sam-manifest").hexdigest()


def manifest_key(key: SessionKey, fingerprint: PoolFingerprint) -> str:
    """Name of the session's manifest in a pool; servers whose pages differ do not meet."""
    encoded = msgspec.msgpack.encode(fingerprint)
    of_pool = hashlib.blake2b(encoded, digest_size=8, person=b"sam-manifest").hexdigest()
    return f"{KEY_PREFIX}{of_pool}-{owner_digest(key)}"


def encode_manifest(key: SessionKey, tokens: BranchTokens, fingerprint: PoolFingerprint) -> bytes:
    """Raises ManifestMiss if the branch is too long to be kept."""
    if len(tokens) > MAX_TOKENS:
        raise ManifestMiss(MissReason.TOO_LARGE)
    body = msgspec.msgpack.encode(
        _Body(
            owner=owner_digest(key),
            fingerprint=fingerprint,
            n_tokens=len(tokens),
            extra_key=tokens.extra_key,
            cache_salt=tokens.cache_salt,
            time_s=tokens.time_s,
            n_shared_pages=tokens.n_shared_pages,
            deflated=zlib.compress(_planes(tokens.token_ids), 1),
        )
    )
    encoded = MAGIC + bytes([FORMAT]) + zlib.crc32(body).to_bytes(4, "little") + body
    if len(encoded) > MAX_BYTES:
        raise ManifestMiss(MissReason.TOO_LARGE)
    return encoded


def decode_manifest(
    data: bytes | None, key: SessionKey, fingerprint: PoolFingerprint
) -> BranchTokens:
    """The tokens of a session as a pool of this kind holds them. Raises ManifestMiss."""
    body = _checked_body(data)
    if body.owner != owner_digest(key):
        raise ManifestMiss(MissReason.OWNER)
    theirs = body.fingerprint
    for name, reason in (
        ("hash_scheme", MissReason.HASH_SCHEME),
        ("page_size", MissReason.PAGE_SIZE),
        ("model", MissReason.MODEL),
        ("layout", MissReason.LAYOUT),
    ):
        if getattr(theirs, name) != getattr(fingerprint, name):
            raise ManifestMiss(reason)
    return BranchTokens(
        token_ids=_inflated(body),
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        time_s=body.time_s,
        n_shared_pages=max(0, body.n_shared_pages),
    )


def _checked_body(data: bytes | None) -> _Body:
    if data is None:
        raise ManifestMiss(MissReason.ABSENT)
    if len(data) > MAX_BYTES:
        raise ManifestMiss(MissReason.TOO_LARGE)
    if len(data) < _HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise ManifestMiss(MissReason.CORRUPT)
    if data[len(MAGIC)] != FORMAT:
        raise ManifestMiss(MissReason.FORMAT)
    body = data[_HEADER_BYTES:]
    if zlib.crc32(body) != int.from_bytes(data[len(MAGIC) + 1 : _HEADER_BYTES], "little"):
        raise ManifestMiss(MissReason.CORRUPT)
    try:
        return msgspec.msgpack.decode(body, type=_Body)
    except msgspec.DecodeError:
        raise ManifestMiss(MissReason.CORRUPT) from None


def _inflated(body: _Body) -> bytes:
    if not 0 <= body.n_tokens <= MAX_TOKENS:
        raise ManifestMiss(MissReason.TOO_LARGE)
    n_bytes = body.n_tokens * _TOKEN_BYTES
    inflater = zlib.decompressobj()
    try:
        planes = inflater.decompress(body.deflated, max(n_bytes, 1))
    except zlib.error:
        raise ManifestMiss(MissReason.CORRUPT) from None
    if len(planes) != n_bytes or inflater.unconsumed_tail:
        raise ManifestMiss(MissReason.CORRUPT)
    ids = bytearray(n_bytes)
    for i in range(_TOKEN_BYTES):
        ids[i::_TOKEN_BYTES] = planes[i * body.n_tokens : (i + 1) * body.n_tokens]
    return bytes(ids)


def _planes(token_ids: bytes) -> bytes:
    """All first bytes, then all second ones: ids below 65,536 leave two empty planes."""
    return b"".join(token_ids[i::_TOKEN_BYTES] for i in range(_TOKEN_BYTES))


class ManifestStore:
    """The newest tokens per session, the longest unused first to go over `max_bytes`.

    Every call is O(1) beside the copies it makes; all ranks that replay the same calls hold
    the same.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self.n_dropped = 0
        self._kept: OrderedDict[SessionKey, BranchTokens] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[SessionKey]:
        """Keys, the longest unused first."""
        return iter(list(self._kept))

    def put(self, key: SessionKey, tokens: BranchTokens) -> list[SessionKey]:
        """Remember; return whose had to go for it, the session's own if it cannot fit."""
        self.pop(key)
        self._kept[key] = tokens
        self.n_bytes += len(tokens.token_ids)
        dropped = []
        while self.n_bytes > self.max_bytes:
            oldest = next(iter(self._kept))
            self.pop(oldest)
            dropped.append(oldest)
        self.n_dropped += len(dropped)
        return dropped

    def get(self, key: SessionKey) -> BranchTokens | None:
        """What is remembered; being asked for counts as use."""
        tokens = self._kept.get(key)
        if tokens is not None:
            self._kept.move_to_end(key)
        return tokens

    def peek(self, key: SessionKey) -> BranchTokens | None:
        """The same without counting as use; from any thread."""
        return self._kept.get(key)

    def pop(self, key: SessionKey) -> BranchTokens | None:
        tokens = self._kept.pop(key, None)
        if tokens is not None:
            self.n_bytes -= len(tokens.token_ids)
        return tokens

    def cut(self, key: SessionKey, n_tokens: int) -> None:
        """The session's branch ends after `n_tokens` now; nothing is kept of an empty one."""
        tokens = self._kept.get(key)
        if tokens is None or len(tokens) <= n_tokens:
            return
        self.n_bytes -= len(tokens.token_ids)
        if n_tokens <= 0:
            del self._kept[key]
            return
        self._kept[key] = tokens.first(n_tokens)
        self.n_bytes += len(self._kept[key].token_ids)
