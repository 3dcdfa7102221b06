"""Tokens of texts that share most of their parts: each part between special tokens is tokenised
once.

A fast tokenizer splits a text at its special tokens first and works on each part by itself. Owns
which tokenizers that holds for, and what is known of the parts of one conversation. Must never
give other ids than the tokenizer's own `encode`: where that is not certain, it encodes the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sglang.srt.entrypoints.openai.parallel_prompt_encode import parallel_prompt_encode
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class Delegate:
    """Another object with some attributes replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class SplitTokenizer(Delegate):
    """A tokenizer whose `encode` is that of a SegmentEncoder. A method of its class: upstream
    looks there to see that it is not the stock one."""

    def __init__(self, encoder: SegmentEncoder, real: Any) -> None:
        super().__init__(real, _encoder=encoder)

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._encoder.encode(text, **options)


class SegmentEncoder:
    """`encode` of one tokenizer, for one conversation. Not thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._specials = _separators(tokenizer)
        alternatives = sorted(self._specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, alternatives)))
        self._known: dict[tuple[bool, str], Sequence[int]] = {}
        self._given: Sequence[int] | None = None
        self.n_chars = 0

    @property
    def is_usable(self) -> bool:
        """Whether parts can be told apart with this tokenizer."""
        return bool(self._specials)

    def give(self, tokens: Sequence[int] | None) -> None:
        """`tokens` are those of the next text, whatever the caller adds to it; None: not so."""
        self._given = tokens

    def encode(self, text: str, **options: Any) -> list[int]:
        """As the tokenizer's own; `n_chars` grows by what had to be tokenised for it."""
        if self._given is not None:
            tokens, self._given = self._given, None
            self._learn(text, tokens, to_the_end=False)
            return list(tokens)
        if not self._is_plain(text, options):
            return self._encode(text, options)
        if not self._known:
            tokens = self._encode(text, options)
            self._learn(text, tokens, to_the_end=True)
            return tokens
        return self._assemble(text, options)

    def _is_plain(self, text: object, options: dict[str, Any]) -> bool:
        """Whether nothing is asked for but the ids of the text itself."""
        if not self._specials or not isinstance(text, str) or set(options) - {"add_special_tokens"}:
            return False
        return not (
            options.get("add_special_tokens", True) and _n_added(self._tokenizer.backend_tokenizer)
        )

    def _encode(self, text: str, options: dict[str, Any]) -> list[int]:
        self.n_chars += len(text)
        return parallel_prompt_encode(self._tokenizer, text, options)

    def _learn(self, text: str, tokens: Sequence[int], *, to_the_end: bool) -> None:
        """Remember the parts of a text, if its special tokens are where they should be."""
        found = list(self._pattern.finditer(text)) if self._specials else []
        ids = set(self._specials.values())
        at = [i for i, token in enumerate(tokens) if token in ids]
        if not found or [self._specials[m.group()] for m in found] != [tokens[i] for i in at]:
            return
        self._known[True, text[: found[0].start()]] = tokens[: at[0]]
        ends = [(m.start(), i) for m, i in zip(found[1:], at[1:], strict=True)]
        if to_the_end:
            ends.append((len(text), len(tokens)))
        for match, i, (char, end) in zip(found, at, ends, strict=False):
            self._known[False, text[match.end() : char]] = tokens[i + 1 : end]

    def _assemble(self, text: str, options: dict[str, Any]) -> list[int]:
        """The parts' tokens and the special ones between them."""
        tokens: list[int] = []
        before, start = "", 0
        found = [(m.start(), m.end(), m.group()) for m in self._pattern.finditer(text)]
        for char, end, special in [*found, (len(text), len(text), "")]:
            tokens += self._part(before, text[start:char], options)
            if special:
                tokens.append(self._specials[special])
            before, start = special, end
        return tokens

    def _part(self, before: str, part: str, options: dict[str, Any]) -> Sequence[int]:
        """Of one part, behind the special token `before`: the first part of a text may be
        tokenised in another way than the same behind a special token."""
        key = (not before, part)
        if key not in self._known:
            tokens = self._encode(before + part, options)
            self._known[key] = tokens[1:] if before else tokens
        return self._known[key]


def _separators(tokenizer: Any) -> dict[str, int]:
    """The special tokens at which a text is split before all else, by their text; none where
    that is not certain."""
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or type(tokenizer).encode is not PreTrainedTokenizerBase.encode
        or type(tokenizer)._encode_plus is not PreTrainedTokenizerFast._encode_plus
        or tokenizer.split_special_tokens
    ):
        return {}
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    if (
        backend.truncation is not None
        or backend.padding is not None
        or backend.encode_special_tokens
        or any(t.lstrip or t.rstrip or t.single_word for t in added.values())
    ):
        return {}
    return {t.content: i for i, t in added.items() if t.content and not t.normalized}


def _n_added(backend: Any) -> int:
    """How many special tokens the tokenizer puts around a text by itself."""
    processor = backend.post_processor
    return processor.num_special_tokens_to_add(False) if processor is not None else 0
