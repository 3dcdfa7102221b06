"""Ownership tags that say when they are inconsistent instead of failing.

Owns the report of such a fault. Must never change what a tag means: that is `ownership.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sam.core.sessions import SessionRef
from sam.srt.mem_cache.ownership import OwnershipTags

_FAULTS = (KeyError, AttributeError, AssertionError)


class ShadowTags(OwnershipTags):
    """`faulted(error)`: the paths that the tags counted on are not there any more."""

    faulted: Callable[[Exception], None] | None = None

    def set_branch(self, ref: SessionRef, leaf: Any, *, ended: bool = False) -> None:
        try:
            super().set_branch(ref, leaf, ended=ended)
        except _FAULTS as error:
            self._fault(error)

    def release(self, ref: SessionRef) -> list[Any]:
        try:
            return super().release(ref)
        except _FAULTS as error:
            self._fault(error)
            return []

    def _fault(self, error: Exception) -> None:
        if self.faulted is None:
            raise error
        self.faulted(error)
