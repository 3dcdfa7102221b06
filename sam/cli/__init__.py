"""`sam`: the operator's command line.

Owns the entry point of the console script. What talks to a server must import neither SGLang
nor torch: it runs on any machine, and starts at once.
"""

from sam.cli.app import main

__all__ = ["main"]
