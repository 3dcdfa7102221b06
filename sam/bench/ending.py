"""How a command line ends early: one interrupt, one line about the reason.

Owns signals while servers run. Must never leave a handler behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def first_signal_interrupts() -> Iterator[None]:
    """SIGINT or SIGTERM raises KeyboardInterrupt once; while servers stop, more are ignored."""

    def interrupt(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with ExitStack() as restore:
        for number in (signal.SIGINT, signal.SIGTERM):
            restore.callback(signal.signal, number, signal.signal(number, interrupt))
        yield


def reason_of(error: BaseException) -> str:
    """Kind and text of the error, of the first one where several came together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
