"""Manifests: what was written comes back, and nothing else ever does."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam.core import manifests
from sam.core.manifests import (
    BranchTokens,
    ManifestMiss,
    ManifestStore,
    MissReason,
    PoolFingerprint,
    decode_manifest,
    encode_manifest,
    manifest_key,
    owner_digest,
)
from sam.core.sessions import SessionKey

HERE = PoolFingerprint(hash_scheme="chain-1", page_size=16, model="tiny", layout="f32/lf")
A = SessionKey("key-1", "session-a")

ids = st.lists(st.integers(0, 2**31 - 1), max_size=200)
namespace = st.none() | st.text(max_size=8)


def tokens(values=(1, 2, 3), **fields):
    return BranchTokens(token_ids=array("i", values).tobytes(), **fields)


def reason_of(data, key=A, fingerprint=HERE):
    with pytest.raises(ManifestMiss) as miss:
        decode_manifest(data, key, fingerprint)
    return miss.value.reason


@given(
    ids=ids,
    extra_key=namespace,
    salt=namespace,
    time_s=st.floats(0, 1e9),
    n_shared=st.integers(0, 2**31),
)
def test_round_trip(ids, extra_key, salt, time_s, n_shared):
    fields = {"extra_key": extra_key, "cache_salt": salt, "time_s": time_s}
    branch = tokens(ids, n_shared_pages=n_shared, **fields)
    assert decode_manifest(encode_manifest(A, branch, HERE), A, HERE) == branch


@given(ids=ids, data=st.data())
def test_no_damage_gets_through(ids, data):
    encoded = bytearray(encode_manifest(A, tokens(ids), HERE))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    assert reason_of(bytes(encoded)) in (MissReason.CORRUPT, MissReason.FORMAT)
    assert reason_of(bytes(encoded[:at])) in (MissReason.CORRUPT, MissReason.FORMAT)


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
def test_garbage_is_a_miss(data):
    assert isinstance(reason_of(data), MissReason)
    assert isinstance(reason_of(manifests.MAGIC + bytes([manifests.FORMAT]) + data), MissReason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hash_scheme": "chain-2"}, MissReason.HASH_SCHEME),
        ({"page_size": 32}, MissReason.PAGE_SIZE),
        ({"model": "other"}, MissReason.MODEL),
        ({"layout": "bf16/lf"}, MissReason.LAYOUT),
    ],
)
def test_a_foreign_pool_is_a_miss_with_its_reason(change, reason):
    fields = {"hash_scheme": "chain-1", "page_size": 16, "model": "tiny", "layout": "f32/lf"}
    theirs = PoolFingerprint(**fields | change)
    assert reason_of(encode_manifest(A, tokens(), theirs)) is reason
    assert manifest_key(A, theirs) != manifest_key(A, HERE)


def test_a_newer_format_is_a_miss():
    encoded = bytearray(encode_manifest(A, tokens(), HERE))
    encoded[len(manifests.MAGIC)] += 1
    assert reason_of(bytes(encoded)) is MissReason.FORMAT


def test_an_absent_one_is_a_miss():
    assert reason_of(None) is MissReason.ABSENT


def test_another_owners_manifest_is_a_miss():
    """Case 8: the same session id of another tenant, copied to where A's would lie."""
    encoded = encode_manifest(A, tokens(cache_salt="s"), HERE)
    assert reason_of(encoded, SessionKey("key-2", "session-a")) is MissReason.OWNER


def test_keys_tell_owners_apart_and_name_none():
    keys = [A, SessionKey("key-2", "session-a"), SessionKey("key-1s", "ession-a")]
    names = {manifest_key(key, HERE) for key in keys}
    assert len(names) == len({owner_digest(key) for key in keys}) == 3
    assert all(len(name) < 64 and "session-a" not in name and "key" not in name for name in names)


def test_too_long_a_branch_is_refused_both_ways(monkeypatch):
    encoded = encode_manifest(A, tokens(range(100)), HERE)
    monkeypatch.setattr(manifests, "MAX_TOKENS", 99)
    with pytest.raises(ManifestMiss, match="too_large"):
        encode_manifest(A, tokens(range(100)), HERE)
    assert reason_of(encoded) is MissReason.TOO_LARGE
    monkeypatch.setattr(manifests, "MAX_BYTES", 20)
    assert reason_of(encoded) is MissReason.TOO_LARGE
    with pytest.raises(ManifestMiss, match="too_large"):
        encode_manifest(A, tokens(range(90)), HERE)


def test_what_says_fewer_tokens_than_it_holds_takes_no_memory(monkeypatch):
    """A small object that inflates to much more than it says."""
    real = manifests._planes
    monkeypatch.setattr(manifests, "_planes", lambda ids: real(ids) + bytes(1 << 24))
    bomb = encode_manifest(A, tokens(), HERE)
    assert len(bomb) < 1 << 17
    assert reason_of(bomb) is MissReason.CORRUPT


def test_real_ids_are_packed():
    rng = random.Random(1)
    words = [rng.randrange(32_000) for _ in range(2_000)]
    text = [rng.choice(words) for _ in range(20_000)]
    branch = tokens(text)
    assert len(encode_manifest(A, branch, HERE)) < 0.5 * len(branch.token_ids)


def test_store_keeps_the_newest_and_drops_the_longest_unused():
    store = ManifestStore(max_bytes=100)
    keys = [SessionKey("t", str(i)) for i in range(4)]
    for key in keys[:3]:
        assert store.put(key, tokens(range(8))) == []
    assert store.get(keys[0]) is not None
    assert store.put(keys[3], tokens(range(8))) == [keys[1]]
    assert list(store) == [keys[2], keys[0], keys[3]]
    store.put(keys[2], tokens(range(2)))
    assert len(store.get(keys[2])) == 2 and store.n_bytes == 72
    assert store.put(keys[1], tokens(range(30)))[-1] == keys[1]
    assert store.get(keys[1]) is None and store.n_bytes == 0 and len(store) == 0


def test_store_cuts_a_branch():
    store = ManifestStore(max_bytes=1_000)
    store.put(A, tokens(range(10), extra_key="e"))
    store.cut(A, 20)
    assert len(store.get(A)) == 10
    store.cut(A, 4)
    assert store.get(A) == tokens(range(4), extra_key="e") and store.n_bytes == 16
    store.cut(A, 0)
    assert store.get(A) is None and store.n_bytes == 0


@given(
    ops=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 40))),
    bound=st.integers(0, 200),
)
def test_store_never_exceeds_its_bound(ops, bound):
    store, newest = ManifestStore(bound), {}
    for op, i, n in ops:
        key = SessionKey("t", str(i))
        if op < 2:
            newest[key] = tokens(range(n))
            for gone in store.put(key, newest[key]):
                del newest[gone]
        elif op == 2:
            assert store.pop(key) == newest.pop(key, None)
        elif op == 3:
            store.cut(key, n)
            if key in newest and n < len(newest[key]):
                newest[key] = newest[key].first(n)
                if n == 0:
                    del newest[key]
        else:
            assert store.get(key) == newest.get(key)
        assert store.n_bytes == sum(len(t.token_ids) for t in newest.values()) <= bound
        assert set(store) == set(newest)
