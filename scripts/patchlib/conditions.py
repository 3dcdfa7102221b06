"""Remove-When and Marker: the facts about upstream that a script can decide.

Owns their grammar. Must never import the engine.

    symbol MODULE:NAME[.ATTR]     upstream defines that name
    text PATH: LITERAL            that upstream file holds the literal
    version >= X.Y.Z              that version is out
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .symbols import module_exists, symbol_exists
from .trees import Tree

_SYMBOL = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_][\w.]*)")
_TEXT = re.compile(r"text\s+(\S+):\s+(\S.*)")
_VERSION = re.compile(r"version\s*>=\s*(\d+(?:\.\d+)*)")


class ConditionError(ValueError):
    pass


@dataclass(frozen=True)
class Condition:
    kind: str
    place: str
    value: str

    def holds(self, tree: Tree, version: str | None) -> bool:
        if self.kind == "symbol":
            return symbol_exists(tree, self.place, self.value)
        if self.kind == "text":
            content = tree.read(self.place)
            return content is not None and self.value.encode() in content
        return version is not None and version_key(version) >= version_key(self.value)

    def lost(self, tree: Tree) -> str | None:
        """Why the condition can never be seen to hold in this tree, or None."""
        if self.kind == "symbol" and not module_exists(tree, self.place):
            return f"Remove-When: module {self.place} is gone"
        if self.kind == "text" and tree.read(self.place) is None:
            return f"Remove-When: {self.place} is gone"
        return None


def parse_condition(text: str) -> Condition:
    if text.startswith("symbol "):
        module, name = parse_symbol(text.removeprefix("symbol ").strip())
        return Condition("symbol", module, name)
    if match := _TEXT.fullmatch(text):
        return Condition("text", match[1], match[2])
    if match := _VERSION.fullmatch(text):
        return Condition("version", "", match[1])
    raise ConditionError(
        f"{text!r} is none of: symbol MODULE:NAME[.ATTR] | text PATH: LITERAL | version >= X"
    )


def parse_symbol(text: str) -> tuple[str, str]:
    match = _SYMBOL.fullmatch(text)
    if not match:
        raise ConditionError(f"{text!r} is not MODULE:NAME[.ATTR]")
    return match[1], match[2]


def version_key(text: str) -> tuple[int, ...]:
    """The release numbers; what follows them (rc1, .post1) does not count."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()
