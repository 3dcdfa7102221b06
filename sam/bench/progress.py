"""Progress of a counted piece of work, on a terminal and in a log file.

Owns: how progress looks. Must never write to standard output, which belongs to results.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINES = 5


class Steps:
    """Context manager: a bar on a terminal, about five plain lines elsewhere."""

    def __init__(self, log: Console, title: str, total: int) -> None:
        self._log, self._title, self._total, self._done = log, title, total, 0
        self._bar: Progress | None = None
        if log.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), console=log)
            self._bar.add_task(title, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
        elif self._done * _LINES // self._total > (self._done - 1) * _LINES // self._total:
            self._log.print(f"{self._title}: {self._done} of {self._total}")
