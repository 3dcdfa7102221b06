"""`python -m sam.bench predict`: the replay on a simulated server, beside what live ones did.

Owns: nothing; `cli` is the command line.
"""

from sam.bench.predict.cli import main

__all__ = ["main"]
