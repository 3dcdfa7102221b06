"""`python -m sam.bench replay`: the same agent work on several servers, one after another.

Owns: nothing; `cli` is the command line.
"""

from sam.bench.replay.cli import main

__all__ = ["main"]
