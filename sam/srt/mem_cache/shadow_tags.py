"""Ownership tags that say whose class may have changed, and when they are inconsistent.

Owns the notices only. Must never change what a tag means: that is `ownership.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sam.core.retention import RetentionClass
from sam.core.sessions import SessionRef
from sam.srt.mem_cache.ownership import OwnershipTags, Tag


class ShadowTags(OwnershipTags):
    """`changed(node)`: the class of the node, and of what is above it, may be another.
    `faulted(error)`: the paths that the tags counted on are not there any more."""

    changed: Callable[[Any], None] | None = None
    faulted: Callable[[Exception], None] | None = None

    def class_of(self, node: Any) -> int:
        """Retention class as a plain number; cheap while there are no sessions."""
        if not self._counts and not self._released:
            return int(RetentionClass.PLAIN)
        return int(self.retention_class(node, node.backuped))

    def set_branch(self, ref: SessionRef, leaf: Any, cls: int) -> None:
        try:
            super().set_branch(ref, leaf, cls)
        except (KeyError, AttributeError, AssertionError) as error:
            self._fault(error)

    def set_class(self, ref: SessionRef, cls: int) -> None:
        try:
            super().set_class(ref, cls)
            anchor = self.current(ref)
            if anchor is not None:
                self._notify(anchor)
        except (KeyError, AttributeError, AssertionError) as error:
            self._fault(error)

    def release(self, ref: SessionRef) -> list[Any]:
        try:
            return super().release(ref)
        except (KeyError, AttributeError, AssertionError) as error:
            self._fault(error)
            return []

    def _add(self, tag: Tag) -> Tag:
        super()._add(tag)
        self._notify(tag.anchor)
        return tag

    def _remove(self, tag: Tag) -> None:
        super()._remove(tag)
        self._notify(tag.anchor)

    def _mark_released(self, ref: SessionRef, node: Any) -> None:
        super()._mark_released(ref, node)
        self._notify(node)

    def _unmark_released(self, node: Any) -> None:
        if node.id in self._released:
            super()._unmark_released(node)
            self._notify(node)

    def _notify(self, node: Any) -> None:
        if self.changed is not None:
            self.changed(node)

    def _fault(self, error: Exception) -> None:
        if self.faulted is None:
            raise error
        self.faulted(error)
