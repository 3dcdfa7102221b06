"""The troubleshooting page quotes what the code says, and knows every reason of an outcome."""

import ast
import re

from sam.core.validation import HintReason
from tests.unit.docs_pages import REPO

PAGE = (REPO / "docs" / "troubleshooting.md").read_text()
REFERENCE = (REPO / "docs" / "protocol-reference.md").read_text()


def texts_of_the_code():
    """All string constants, those in f-strings joined by a gap."""
    import sglang.srt.mem_cache.registry as registry

    files = [*(REPO / "sam").rglob("*.py"), *(REPO / "scripts").rglob("*.py")]
    found = []
    for source in [*map(str, files), registry.__file__]:
        with open(source) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\1".join(found)


def quoted():
    """Messages in the first column of the tables whose head is about what is said."""
    in_table = False
    for line in PAGE.splitlines():
        if not line.startswith("|"):
            in_table = False
        elif re.match(r"\| (it says|log line) \|", line):
            in_table = True
        elif in_table:
            yield from re.findall(r"`([^`]+)`", line.split("|")[1])


def test_messages_are_those_of_the_code():
    code = texts_of_the_code()
    messages = [text for text in quoted() if " " in text]
    assert len(messages) > 25
    pieces = [piece.strip(" =") for text in messages for piece in re.split("…|'sam'", text)]
    pieces = [re.sub(r"0\.5\.23\S*", "…", piece) for piece in pieces]
    parts = [part.strip() for piece in pieces for part in piece.split("…")]
    unknown = [part for part in parts if len(part) > 5 and part not in code]
    assert not unknown, unknown


def reasons_of_the_code():
    """Words that an outcome may carry as its reason."""
    sources = [REPO / "sam" / "srt" / part for part in ("managers", "mem_cache", "entrypoints")]
    found = set()
    for path in (path for folder in sources for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            found |= set(map(_word, _reasons_in(node)))
    return found - {""}


def _reasons_in(node):
    match node:
        case ast.keyword(arg="reason"):
            return [node.value]
        case ast.Call(func=ast.Name(id="not_done"), args=[_, reason]):
            return [reason]
        case ast.Assign(targets=[ast.Attribute(attr="_clipped" | "_short")]):
            return [n for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
        case ast.Assign(targets=[ast.Name(id="OVERLOADED" | "PARALLEL_SAMPLES")]):
            return [node.value]
    return []


def _word(node):
    value = node.value if isinstance(node, ast.Constant) else ""
    return value if isinstance(value, str) and re.fullmatch(r"[a-z]+(_[a-z]+)*", value) else ""


def test_every_reason_has_a_remedy():
    found = reasons_of_the_code()
    assert len(found) > 20
    unknown = [reason for reason in sorted(found) if f"`{reason}`" not in PAGE]
    assert not unknown, f"docs/troubleshooting.md lacks {unknown}"


def test_reasons_of_malformed_hints_are_in_the_reference():
    assert [one.value for one in HintReason if f"`{one.value}`" not in REFERENCE] == []
