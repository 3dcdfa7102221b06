"""What a newer upstream does to each patch and to the private names the overlay imports.

Owns the classes of drift. Must never fetch anything and never write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from .conditions import ConditionError, parse_condition
from .diff import DiffError, FileDiff
from .series import Patch, Series, apply_loose, apply_strict
from .symbols import (
    class_members,
    engine_imports,
    module_exists,
    module_names,
    path_module,
    self_attributes,
    symbol_exists,
)
from .trees import EditedTree, Tree, visible


class Drift(Enum):
    APPLIES = "APPLIES"
    OFFSET = "OFFSET"
    CONFLICT = "CONFLICT"
    MERGED = "MERGED"
    SYMBOL = "SYMBOL"


@dataclass(frozen=True)
class Row:
    name: str
    drift: Drift
    reasons: tuple[str, ...] = ()

    @property
    def harmless(self) -> bool:
        return self.drift in (Drift.APPLIES, Drift.OFFSET, Drift.MERGED)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "drift": self.drift.value, "reasons": list(self.reasons)}


def survey_drift(
    series: Series,
    tree: Tree,
    version: str | None,
    base: Tree | None,
    overlay: Sequence[bytes],
) -> list[Row]:
    """One row per patch, each on what the patches before it left; then one for the overlay."""
    now = EditedTree(tree)
    then = EditedTree(base) if base is not None else None
    rows = []
    for patch in series.patches:
        if then is not None:
            _advance(patch, then)
        rows.append(_classify(patch, tree, now, then, version))
    if overlay:
        added = {name for patch in series.patches for name in _added_names(patch)}
        rows.append(overlay_row(overlay, now, added))
    return rows


def overlay_row(
    sources: Sequence[bytes], tree: Tree, added: Set[tuple[str, str | None]] = frozenset()
) -> Row:
    """The upstream names that the overlay needs: what it imports, and the members it lists in
    a `USED_MEMBERS` of `module:Class` -> names. `added` are those that our own patches bring,
    also where a patch does not apply: that is the patch's row."""
    needed: set[tuple[str, str | None]] = set()
    for source in sources:
        needed.update(engine_imports(source), _listed_members(source))
    lost = tuple(
        f"{module}:{name}" if name else module
        for module, name in sorted(needed - added, key=str)
        if not _importable(tree, module, name)
    )
    reasons = tuple(f"{name} is gone" for name in lost)
    return Row("(overlay imports)", Drift.SYMBOL if lost else Drift.APPLIES, reasons)


def _added_names(patch: Patch) -> Iterator[tuple[str, str | None]]:
    """Modules, and classes and functions at the top of one, that a patch adds."""
    for diff in patch.diffs:
        module = path_module(diff.path)
        if diff.creates:
            yield module, None
        for line in diff.added():
            if match := re.match(rb"(?:class|def|async def)\s+(\w+)", line):
                yield module, match[1].decode()


def _listed_members(source: bytes) -> Iterator[tuple[str, str | None]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "USED_MEMBERS":
            assert node.value is not None
            for owner, names in ast.literal_eval(node.value).items():
                module, _, cls = owner.partition(":")
                yield from ((module, f"{cls}.{name}" if cls else name) for name in names)


def _importable(tree: Tree, module: str, name: str | None) -> bool:
    return module_exists(tree, module) if name is None else symbol_exists(tree, module, name)


def _advance(patch: Patch, tree: EditedTree) -> None:
    for diff in patch.diffs:
        tree.edits[diff.path] = apply_strict(patch, diff, tree.read(diff.path))


def _classify(
    patch: Patch, tree: Tree, now: EditedTree, then: EditedTree | None, version: str | None
) -> Row:
    merged = _merged(patch, tree, now, version)
    if merged:
        return Row(patch.name, Drift.MERGED, (merged,))
    results: dict[str, bytes | None] = {}
    offsets: list[int] = []
    for diff in patch.diffs:
        try:
            applied = apply_loose(diff, now.read(diff.path))
        except DiffError as error:
            return Row(patch.name, Drift.CONFLICT, (str(error),))
        results[diff.path] = applied.content
        offsets += applied.offsets
    now.edits.update(results)
    lost = tuple(_lost_symbols(patch, tree, now, then))
    if lost:
        return Row(patch.name, Drift.SYMBOL, lost)
    if any(offsets):
        largest = max(offsets, key=abs)
        return Row(patch.name, Drift.OFFSET, (f"largest offset {largest:+d} lines",))
    return Row(patch.name, Drift.APPLIES)


def _merged(patch: Patch, tree: Tree, now: EditedTree, version: str | None) -> str | None:
    for text in patch.header.all("Remove-When"):
        try:
            if parse_condition(text).holds(tree, version):
                return f"Remove-When holds: {text}"
        except ConditionError:
            continue
    diffs = [diff for diff in patch.diffs if visible(tree, diff.path)]
    if not diffs:
        return None
    for diff in diffs:
        try:
            apply_loose(diff.reverse(), now.read(diff.path))
        except DiffError:
            return None
    return "upstream holds this change already"


# --- symbols ----------------------------------------------------------------------------


def _lost_symbols(
    patch: Patch, tree: Tree, now: EditedTree, then: EditedTree | None
) -> Iterator[str]:
    for text in patch.header.all("Remove-When"):
        try:
            condition = parse_condition(text)
        except ConditionError:
            continue
        if condition.kind == "text" and not visible(tree, condition.place):
            continue
        lost = condition.lost(tree)
        if lost and not _patch_made(patch, lost):
            yield lost
    for diff in patch.diffs:
        if diff.path.endswith(".py"):
            yield from _lost_in_file(diff, now, then)


def _patch_made(patch: Patch, text: str) -> bool:
    """The condition names a module that this patch itself adds: absence is normal."""
    made = [diff.path for diff in patch.diffs if diff.creates]
    return any(path in text or path_module(path) in text for path in made)


def _lost_in_file(diff: FileDiff, now: EditedTree, then: EditedTree | None) -> Iterator[str]:
    source = now.read(diff.path)
    if source is None:
        return
    try:
        node = ast.parse(source)
    except SyntaxError as error:
        yield f"{diff.path}: does not compile any more: {error}"
        return
    added = _added_nodes(node, diff, source)
    for module, name in _added_imports(added, path_module(diff.path)):
        if not _importable(now, module, name):
            yield f"{diff.path} imports {module}:{name or ''}, which is gone"
    old = then.read(diff.path) if then is not None else None
    if old is not None and then is not None:
        yield from _lost_names(diff.path, added, node, (then, old), now)


def _added_nodes(node: ast.AST, diff: FileDiff, source: bytes) -> list[ast.AST]:
    """Nodes that start on a line whose text the patch adds."""
    added = {line.strip() for line in diff.added()}
    lines = source.split(b"\n")
    return [
        child
        for child in ast.walk(node)
        if hasattr(child, "lineno") and lines[child.lineno - 1].strip() in added
    ]


def _added_imports(nodes: list[ast.AST], module: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found += engine_imports(ast.unparse(node).encode(), module)
    return found


def _lost_names(
    path: str,
    added: list[ast.AST],
    node: ast.AST,
    old: tuple[Tree, bytes],
    now: Tree,
) -> Iterator[str]:
    """Names that the added lines use, defined in this file at the base but not here."""
    before, after = (module_names(tree, path_module(path)) for tree in (old[0], now))
    used = {child.id for child in added if isinstance(child, ast.Name)}
    for name in sorted(used & (before - after)):
        yield f"{path} uses {name}, which is gone from its module"
    members = (_members(ast.parse(old[1])), _members(node))
    attributes = {child.attr for child in added if _is_self_attribute(child)}
    for name in sorted(attributes & (members[0] - members[1])):
        yield f"{path} uses self.{name}, which is gone from its classes"


def _members(node: ast.AST) -> set[str]:
    classes = (child for child in ast.walk(node) if isinstance(child, ast.ClassDef))
    return self_attributes(node).union(*(class_members(child) for child in classes))


def _is_self_attribute(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def render_table(rows: list[Row], against: str) -> str:
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"against {against}"]
    for row in rows:
        lines.append(f"  {row.drift.value:<8}  {row.name:<{width}}".rstrip())
        lines += [f"            {reason}" for reason in row.reasons]
    return "\n".join(lines)


def to_json(rows: list[Row], against: str, version: str | None) -> Mapping[str, object]:
    return {"against": against, "version": version, "rows": [row.to_json() for row in rows]}
