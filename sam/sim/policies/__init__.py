"""Policies by name: every module here is one, found by its file name.

Owns the look-up. A module defines `ABOUT` (one line) and `create(setup) -> Policy`; its
name is the file's, with `-` for `_`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from sam.sim.policy import Policy, Setup


def names() -> list[str]:
    """All policies, sorted."""
    return sorted(module.name.replace("_", "-") for module in iter_modules(__path__))


def about(name: str) -> str:
    return import_module(f"{__name__}.{name.replace('-', '_')}").ABOUT


def create(name: str, setup: Setup) -> Policy:
    """A new, empty policy. Raises ValueError naming the choices."""
    if name not in names():
        raise ValueError(f"policy {name!r}: choose from {', '.join(names())}")
    return import_module(f"{__name__}.{name.replace('-', '_')}").create(setup)
