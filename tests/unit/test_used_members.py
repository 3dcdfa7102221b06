"""Every upstream member that an overlay class overrides, or calls by a private name, is listed:
a release without it must stop the start, not fail on the first request."""

import ast
import importlib
import inspect
import sys

import pytest

pytest.importorskip("sglang")

from sam.srt import upstream

SUBCLASSES = {
    "sam.srt.mem_cache.tree_core:SessionTreeCore": upstream.USED_MEMBERS,
    "sam.srt.mem_cache.cache:SessionRadixCache": upstream.USED_MEMBERS,
    "sam.srt.mem_cache.shadow_follow:FollowedTreeCore": upstream.USED_RUST_MEMBERS,
    "sam.srt.mem_cache.shadow_core:ShadowTreeCore": upstream.USED_RUST_MEMBERS,
}
OUR_PATCHES = {"apply_kv_hints", "kv_hint_sink", "on_request_queued"}


def loaded(symbol):
    module, _, name = symbol.partition(":")
    if "shadow" in module and not upstream.has_rust_core():
        pytest.skip("no Rust core here")
    return getattr(importlib.import_module(module), name)


def names_in(cls):
    """(what the class defines and takes from super(), its private names on self)."""
    tree = ast.parse(inspect.getsource(cls))
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    of_super = {n.attr for n in attributes if ast.unparse(n.value) == "super()"}
    of_self = {n.attr for n in attributes if ast.unparse(n.value) == "self"}
    public = {name for name in functions | of_super if not name.startswith("__")}
    return public, {name for name in of_self if name.startswith("_")}


def of_upstream(cls, name):
    """Whether an upstream base has the member, set in a method or not."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("sglang.")]
    owners = [f"{base.__module__}:{base.__name__}" for base in bases]
    return any(upstream._has_member(owner, name) for owner in owners)


@pytest.mark.parametrize("symbol", SUBCLASSES)
def test_subclasses_list_what_they_override_and_call(symbol):
    cls, table = loaded(symbol), SUBCLASSES[symbol]
    listed = {name for names in table.values() for name in names}
    taken, private = names_in(cls)
    bases = [base for base in cls.__mro__ if base.__module__.startswith("sam.")]
    ours = {name for base in bases for name in vars(base)}
    theirs = {name for name in taken | (private - ours) if of_upstream(cls, name)}
    missing = theirs - listed - OUR_PATCHES
    assert not missing, f"list in sam/srt/upstream.py: {sorted(missing)}"


def test_nothing_listed_is_gone():
    assert upstream.missing_members() == []


@pytest.mark.parametrize("table", ["USED_MEMBERS", "USED_RUST_MEMBERS"])
def test_a_member_that_vanished_is_found(table, monkeypatch):
    if table == "USED_RUST_MEMBERS" and not upstream.has_rust_core():
        pytest.skip("no Rust core here")
    owner = next(iter(getattr(upstream, table)))
    monkeypatch.setattr(upstream, table, {owner: ("reset", "_never_was")})
    assert upstream.missing_members() == [f"{owner}._never_was"]
    with pytest.raises(upstream.UpstreamError, match="_never_was"):
        upstream.verify()


def test_without_the_rust_core_its_members_are_not_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.rust_tree_core.adapter", None)
    monkeypatch.setattr(upstream, "USED_RUST_MEMBERS", {"nowhere:Gone": ("x",)})
    assert not upstream.has_rust_core()
    upstream.verify()
