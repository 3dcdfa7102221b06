"""The import contracts of the package, read from the syntax tree: nothing is imported."""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "sam"


class Import(NamedTuple):
    where: str  # "path:line"
    module: str  # importing module
    target: str  # imported module, or module.name for from-imports


def module_name(path, root):
    parts = list(path.relative_to(root.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def resolve(node, module, is_package):
    """Absolute module of a from-import."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def literal_import(node):
    """Target of import_module("x") and __import__("x")."""
    function = getattr(node.func, "attr", getattr(node.func, "id", ""))
    literal = node.args and isinstance(node.args[0], ast.Constant)
    if function in ("import_module", "__import__") and literal:
        return str(node.args[0].value)
    return None


def imports_of(path, root=PACKAGE):
    module = module_name(path, root)
    where = path.relative_to(root.parent)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve(node, module, path.name == "__init__.py")
            targets = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and literal_import(node):
            targets = [literal_import(node)]
        for target in targets:
            yield Import(f"{where}:{node.lineno}", module, target)


def within(name, *packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def is_private(target):
    parts = target.split(".")[1:]
    return any(p.startswith("_") and not p.endswith("__") for p in parts)


def core_breach(imp):
    """sam.core imports only itself, the standard library and plain third parties."""
    if not within(imp.module, "sam.core"):
        return False
    inside = within(imp.target, "sam") and not within(imp.target, "sam.core")
    return inside or within(imp.target, "sglang", "torch")


def core_clock_breach(imp):
    """sam.core reads no clock and rolls no dice."""
    banned = ("time", "datetime", "random", "uuid", "secrets")
    return within(imp.module, "sam.core") and within(imp.target, *banned)


def sim_breach(imp):
    """sam.sim imports of sam only sam.core and itself, and no engine."""
    if not within(imp.module, "sam.sim"):
        return False
    inside = within(imp.target, "sam") and not within(imp.target, "sam.core", "sam.sim")
    return inside or within(imp.target, "sglang", "torch")


def client_breach(imp):
    """sam.client imports only itself and the standard library."""
    if not within(imp.module, "sam.client"):
        return False
    is_standard = imp.target.split(".")[0] in sys.stdlib_module_names
    return not is_standard and not within(imp.target, "sam.client")


def plugin_breach(imp):
    """Nobody imports sam.plugin: only the entry point loads it."""
    return within(imp.target, "sam.plugin") and imp.module != "sam.plugin"


def private_breach(imp):
    """Private upstream names come only through sam.srt.upstream."""
    if imp.module == "sam.srt.upstream":
        return False
    return within(imp.target, "sglang") and is_private(imp.target)


RULES = [core_breach, core_clock_breach, sim_breach, client_breach, plugin_breach, private_breach]


@pytest.fixture(scope="module")
def all_imports():
    return [imp for path in sorted(PACKAGE.rglob("*.py")) for imp in imports_of(path)]


@pytest.mark.parametrize("breach", RULES, ids=lambda rule: rule.__name__)
def test_contract(all_imports, breach):
    found = [f"{imp.where} imports {imp.target}" for imp in all_imports if breach(imp)]
    assert not found, f"{breach.__doc__}\n" + "\n".join(found)


def test_there_is_something_to_check(all_imports):
    for package in ("sam.core", "sam.sim", "sam.client"):
        assert any(within(imp.module, package) for imp in all_imports)


@pytest.mark.parametrize(
    ("path", "source", "breach"),
    [
        ("core/a.py", "import torch.nn", core_breach),
        ("core/a.py", "def f():\n    from sglang.srt import x", core_breach),
        ("core/a.py", "from sam.srt.managers import y", core_breach),
        ("core/a.py", "from sam import platform", core_breach),
        ("core/a.py", "from ..srt import y", core_breach),
        ("core/a.py", "import importlib; importlib.import_module('sglang')", core_breach),
        ("core/a.py", "import time", core_clock_breach),
        ("core/__init__.py", "from datetime import datetime", core_clock_breach),
        ("sim/a.py", "from sam.bench import z", sim_breach),
        ("sim/__init__.py", "from ..srt import y", sim_breach),
        ("client/a.py", "import openai", client_breach),
        ("client/a.py", "def f():\n    from msgspec import Struct", client_breach),
        ("client/a.py", "from sam.core.hints import x", client_breach),
        ("client/__init__.py", "from .. import core", client_breach),
        ("srt/a.py", "from sam import plugin", plugin_breach),
        ("cli.py", "import sam.plugin", plugin_breach),
        ("srt/a.py", "from sglang.srt.x import _hidden", private_breach),
        ("srt/a.py", "import sglang.srt._x.y", private_breach),
    ],
)
def test_the_checker_sees_breaches(tmp_path, path, source, breach):
    file = tmp_path / "sam" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    assert any(breach(imp) for imp in imports_of(file, tmp_path / "sam"))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/a.py", "import msgspec\nfrom sam.core.b import c\nfrom . import d"),
        ("sim/a.py", "import numpy\nfrom sam.core import x\nfrom .b import y"),
        ("client/a.py", "import os.path\nfrom typing import Any\nfrom . import b"),
        ("client/__init__.py", "from sam.client.a import b"),
        ("srt/upstream.py", "from sglang.srt.x import _hidden"),
        ("srt/a.py", "from sglang import __version__\nfrom sam.core import x"),
    ],
)
def test_the_checker_passes_what_is_allowed(tmp_path, path, source):
    file = tmp_path / "sam" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    for imp in imports_of(file, tmp_path / "sam"):
        assert not any(breach(imp) for breach in RULES), imp


@pytest.mark.parametrize(
    "patch", sorted((REPO / "patches").glob("*.patch")), ids=lambda path: path.name
)
def test_no_patched_line_mentions_the_overlay(patch):
    """The header may (author, Used-By): it is not what upstream's tree gets."""
    lines = patch.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("diff --git "))
    found = [line for line in lines[start:] if re.search(r"\bsam\b", line, re.IGNORECASE)]
    assert not found, "\n".join(found)
