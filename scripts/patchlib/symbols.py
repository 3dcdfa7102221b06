"""Which names a source tree defines, found without importing it.

Owns the static lookup of modules, their top-level names, and members of classes. Must
never import what it inspects.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .trees import Tree

_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While)


def module_exists(tree: Tree, module: str) -> bool:
    return module_source(tree, module) is not None or _opaque(tree, module)


def module_source(tree: Tree, module: str) -> bytes | None:
    stem = "python/" + module.replace(".", "/")
    source = tree.read(stem + ".py")
    return source if source is not None else tree.read(stem + "/__init__.py")


def _opaque(tree: Tree, module: str) -> bool:
    """A compiled module or a namespace package: it is there, its names are unknown."""
    parent, _, leaf = ("python/" + module.replace(".", "/")).rpartition("/")
    compiled = (name.startswith(leaf + ".") and ".so" in name for name in tree.names(parent))
    return any(compiled) or bool(tree.names(f"{parent}/{leaf}"))


def symbol_exists(tree: Tree, module: str, name: str) -> bool:
    """`name` may be dotted: members of classes count, with attributes set on self."""
    source = module_source(tree, module)
    if source is None:
        return _opaque(tree, module)
    first, *rest = name.split(".")
    node = ast.parse(source)
    if not rest:
        return first in module_names(tree, module) or module_exists(tree, f"{module}.{first}")
    return _member(node, first, rest)


def _member(node: ast.AST, first: str, rest: list[str]) -> bool:
    for child in _statements(getattr(node, "body", [])):
        if isinstance(child, ast.ClassDef) and child.name == first:
            if len(rest) == 1:
                return rest[0] in class_members(child)
            return _member(child, rest[0], rest[1:])
    return False


def module_names(tree: Tree, module: str, _seen: frozenset[str] = frozenset()) -> set[str]:
    source = module_source(tree, module)
    if source is None:
        return set()
    node = ast.parse(source)
    names = set(_bound(_statements(node.body)))
    is_package = tree.read("python/" + module.replace(".", "/") + ".py") is None
    for child in _statements(node.body):
        if isinstance(child, ast.ImportFrom) and any(a.name == "*" for a in child.names):
            other = absolute_module(child, module, is_package)
            if other not in _seen:
                names |= module_names(tree, other, _seen | {module})
    return names


def absolute_module(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join(parts[:keep] + ([node.module] if node.module else []))


def class_members(node: ast.ClassDef) -> set[str]:
    names = set(_bound(_statements(node.body)))
    return names | self_attributes(node)


def self_attributes(node: ast.AST) -> set[str]:
    """Attributes assigned on self anywhere below `node`; `+=` only uses one."""
    grown = {id(child.target) for child in ast.walk(node) if isinstance(child, ast.AugAssign)}
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and id(child) not in grown
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run in this scope, those inside of if, try, with and loops too."""
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound(nodes: Iterable[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Import):
            yield from (a.asname or a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (a.asname or a.name for a in node.names if a.name != "*")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from _target_names(targets)


def _target_names(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        for child in ast.walk(target):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                yield child.id


def engine_imports(source: bytes, module: str = "") -> list[tuple[str, str | None]]:
    """Every import of the engine in `source`: (module, name), name None for the module."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(a.name, None) for a in node.names if _is_engine(a.name)]
        elif isinstance(node, ast.ImportFrom):
            origin = absolute_module(node, module, False)
            if _is_engine(origin):
                found += [(origin, a.name) for a in node.names if a.name != "*"]
    return found


def _is_engine(module: str) -> bool:
    return module == "sglang" or module.startswith("sglang.")


def path_module(path: str) -> str:
    """`python/sglang/a/b.py` -> `sglang.a.b`."""
    dotted = path.removeprefix("python/").removesuffix(".py").replace("/", ".")
    return dotted.removesuffix(".__init__")
