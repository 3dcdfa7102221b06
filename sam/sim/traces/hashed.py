"""From block hashes to paths through streams: what all formats with `hash_ids` share.

Owns the trie of blocks. Must never be a format itself (`read` is not defined here).

A trie node continues its parent's stream if it is the first child, else it starts one.
Blocks are the pages of such a trace, and its last block may be a partial one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import msgspec

from sam.sim.trace import Path, Session, SharedNames, Trace, Turn, without_empty

_NEW_CONTENT_BLOCKS = 1
"""A prompt's last block may change when the prompt grows."""


class Request(msgspec.Struct, kw_only=True):
    """One logged request. `session` None: guessed from the prompt that it continues.

    `is_end`: no request; the client says that the session is over.
    """

    blocks: list[Hashable]
    input_tokens: int
    output_tokens: int = 0
    time_s: float = 0.0
    session: Hashable | None = None
    label: str = "other"
    is_end: bool = False


class BlockTrie:
    """Numbers block sequences: equal prefixes get equal paths."""

    def __init__(self) -> None:
        self._ids = SharedNames()
        self._children: dict[tuple[int, Hashable], int] = {}
        self._stream = [0]  # of each node; the root has none
        self._has_child = [False]

    def walk(self, blocks: Iterable[Hashable]) -> list[int]:
        """The nodes of a prompt, root excluded; new ones are made."""
        node, nodes = 0, []
        for block in blocks:
            child = self._children.get((node, block))
            if child is None:
                child = self._children[(node, block)] = len(self._stream)
                grows = node and not self._has_child[node]
                self._stream.append(self._stream[node] if grows else self._ids[child])
                self._has_child.append(False)
                self._has_child[node] = True
            nodes.append(child)
            node = child
        return nodes

    def path(self, nodes: Iterable[int]) -> Path:
        pieces: list[list[int]] = []
        for node in nodes:
            stream = self._stream[node]
            if pieces and pieces[-1][0] == stream:
                pieces[-1][1] += 1
            else:
                pieces.append([stream, 1])
        return tuple((stream, blocks) for stream, blocks in pieces)


class _Guesser:
    """Finds the session that a prompt continues: the one whose last prompt it begins with."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}  # node -> session whose last prompt ends there
        self._n_made = 0

    def session_of(self, nodes: list[int]) -> int:
        session = None
        for node in reversed(nodes):
            session = self._at.pop(node, None)
            if session is not None:
                break
        if session is None:
            session = self._n_made
            self._n_made += 1
        end = max(len(nodes) - 1 - _NEW_CONTENT_BLOCKS, 0)
        self._at[nodes[end]] = session
        return session


def _end(timed: list[tuple[float, Turn]] | None) -> None:
    """The client ended the session after the last of these turns."""
    if timed:
        time_s, turn = timed[-1]
        timed[-1] = (time_s, msgspec.structs.replace(turn, says_end=True))


def trace_of(requests: Iterable[Request], block_tokens: int, where: str) -> Trace:
    """Requests in their order, as sessions. Raises TraceError if there are none."""
    trie, guesser = BlockTrie(), _Guesser()
    turns: dict[Hashable, list[tuple[float, Turn]]] = {}
    for order, request in enumerate(requests):
        if request.is_end:
            _end(turns.get(request.session))
            continue
        nodes = trie.walk(request.blocks)
        session = request.session
        if session is None and nodes:
            session = ("guessed", guesser.session_of(nodes))
        of_session = turns.setdefault(session, [])
        think_s = max(request.time_s - of_session[-1][0], 0.0) if of_session else 0.0
        turn = Turn(
            path=trie.path(nodes),
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            think_s=think_s,
            label=request.label,
            order=order,
        )
        of_session.append((request.time_s, turn))
    sessions = [
        Session(name=str(name), start_s=timed[0][0], turns=tuple(turn for _, turn in timed))
        for name, timed in turns.items()
    ]
    return Trace(
        sessions=without_empty(sessions, where), page_tokens=block_tokens, as_recorded=True
    )
