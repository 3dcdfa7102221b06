"""From a token range of a rendered window to nodes of a session's branches.

Owns the page alignment, the split of nodes at the boundaries, and what of a range a prefix
tree can honour. Must never move or free anything, nor guess: a range whose tokens are not
those of the tree is missing.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from sam.core.actions import ActionStatus, SessionAction
from sam.srt.mem_cache.ownership import path_up
from sam.srt.mem_cache.tier_tasks import Outcome, not_done


class Span(NamedTuple):
    """A range on the tree, page-aligned inward.

    `top`: the deepest node that stays, the root if none does. `bottom`: the deepest node in
    the range on the current branch. `ends`: the branches that the range is on. [`start`,
    `end`): tokens from the root; `clipped`: why that is not what was asked for.
    """

    top: Any
    bottom: Any
    ends: list[Any]
    start: int
    end: int
    clipped: str


def token_ids_of(action: SessionAction) -> array[int] | None:
    """The window's tokens as the radix tree takes them, or None if they did not come along."""
    if action.token_ids is None:
        return None
    return array("q", memoryview(action.token_ids).cast("i"))


def resolve_span(
    cache: Any, action: SessionAction, ends: list[Any], ids: array[int] | None
) -> Span | Outcome:
    """The span of a `tokens` action on those of `ends` that it is on, the current branch
    first; an outcome where there is none."""
    page = cache.page_size
    start = -(-(action.start or 0) // page) * page
    end = None if action.end is None else action.end // page * page
    if end is not None and end <= start:
        return not_done(ActionStatus.CLIPPED, "less_than_a_page")
    if not ends:
        return not_done(ActionStatus.MISSING, "not_cached")
    core = cache.tree_core
    top = _boundary(cache, action, start, ends[0], ids, up=False)
    if top is None:
        return not_done(ActionStatus.MISSING, "not_cached")
    ends = [leaf for leaf in ends if _is_below(leaf, top)]
    if not ends:
        return not_done(ActionStatus.MISSING, "not_cached")
    bottom = ends[0]
    if end is not None and end < core.path_end(bottom):
        found = _boundary(cache, action, end, bottom, ids, up=True)
        on_branch = found is not None and any(
            leaf is found or _is_below(leaf, found) for leaf in ends
        )
        if not on_branch or not _is_below(found, top):
            return not_done(ActionStatus.CLIPPED, "node_boundary")
        bottom = found
    real_start = core.path_end(top)
    clipped = "node_boundary" if real_start != start else ""
    return Span(top, bottom, ends, real_start, core.path_end(bottom), clipped)


def _boundary(
    cache: Any, action: SessionAction, n_tokens: int, leaf: Any, ids: Any, *, up: bool
) -> Any | None:
    """The node that ends after `n_tokens`; without their ids the next one inward on the way
    to `leaf`: shallower if `up`, else deeper."""
    core = cache.tree_core
    if n_tokens == 0:
        return core.root()
    if ids is not None and n_tokens <= len(ids):
        return cache.node_at(ids[:n_tokens], action.extra_key, action.cache_salt)
    path = [core.root(), *reversed(list(path_up(leaf)))]
    ends = [core.path_end(node) for node in path]
    if up:
        inward = [node for node, end in zip(path, ends, strict=True) if end <= n_tokens]
        return inward[-1]
    inward = [node for node, end in zip(path, ends, strict=True) if end >= n_tokens]
    return inward[0] if inward else None


def _is_below(node: Any, top: Any) -> bool:
    """Whether `top` is a proper ancestor of `node`."""
    node = node.parent
    while node is not None and node is not top:
        node = node.parent
    return node is top
