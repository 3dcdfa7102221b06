"""Runs patchtool and kills the process, uncatchably, before its N-th change of a file.

Owns only the injection: N comes from PATCHTOOL_TEST_KILL_AFTER. Must never be imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import patchtool  # noqa: E402

left = int(os.environ["PATCHTOOL_TEST_KILL_AFTER"])


def counted(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    return call


os.fsync = lambda handle: None
os.replace = counted(os.replace)
os.unlink = counted(os.unlink)
os.rmdir = counted(os.rmdir)

if __name__ == "__main__":
    sys.exit(patchtool.main(sys.argv[1:]))
