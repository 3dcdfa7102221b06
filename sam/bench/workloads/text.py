"""Text of a wanted length in tokens, and tool definitions.

Owns: the words. Must never give two different texts a common beginning by intent: what is shared
is shared because a plan says so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_TOOLS = {
    "read_file": ("whole",),
    "search": ("deep",),
    "run_tests": ("all",),
    "spawn_member": ("alone",),
}
TOOL_NAMES = tuple(name for name in _TOOLS if name != "spawn_member")
SPAWN = "spawn_member"
_MIN_SYSTEM = 16


class Vocabulary:
    """Words of one token each (behind a space), and a count of a text's tokens."""

    def __init__(self, words: Sequence[str], count: Callable[[str], int] | None = None) -> None:
        if len(words) < 16:
            raise ValueError("a vocabulary needs 16 words or more")
        self._words = list(words)
        self.count = count or (lambda text: len(text.split()))

    @classmethod
    def of_model(cls, model: Path) -> Vocabulary:
        """The words of the tokenizer of a model folder."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        entries = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
        plain = (entry[1:] for entry in entries if entry.startswith("Ġ"))
        words = [word for word in plain if word.isascii() and word.isalpha() and len(word) > 2]
        return cls(words, lambda text: len(tokenizer.encode(text).ids))

    def text(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(self._words, k=max(tokens, 1)))

    def tools(self, rng: random.Random) -> tuple[dict[str, Any], ...]:
        return tuple(self._tool(rng, name) for name in _TOOLS)

    def system(
        self, rng: random.Random, tokens: int, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, int]:
        """A system prompt that makes `tokens` together with the tools, or a few words where the
        tools alone are more; and how many both are."""
        of_tools = self.count(json.dumps(list(tools)))
        text = self.text(rng, max(tokens - of_tools, _MIN_SYSTEM))
        return text, of_tools + self.count(text)

    def _tool(self, rng: random.Random, name: str) -> dict[str, Any]:
        """Flags are the only arguments: a grammar soon ends a call that a random model makes."""
        properties = {
            key: {"type": "boolean", "description": self.text(rng, 6)} for key in _TOOLS[name]
        }
        schema = {"type": "object", "properties": properties, "required": list(_TOOLS[name])}
        schema["additionalProperties"] = False
        about = {"name": name, "description": self.text(rng, 8), "parameters": schema}
        return {"type": "function", "function": about}
