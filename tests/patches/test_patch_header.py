"""Headers, conditions, symbols, and the generated files."""

from __future__ import annotations

import patch_toys as toys
import pytest
from patch_toys import CACHE
from patchlib.conditions import ConditionError, parse_condition, parse_symbol, version_key
from patchlib.errors import Exit
from patchlib.header import parse_header
from patchlib.symbols import engine_imports, symbol_exists
from patchlib.trees import DirTree

HEADER = """\
From 0123 Mon Sep 17 00:00:00 2001
From: =?utf-8?q?J=C3=BCrgen?= <j@example.org>
Date: Fri, 2 Jan 2026 00:00:00 +0000
Subject: [PATCH 2/5] [Cache] A long subject that
 goes on

Why: because.

 - a list: yes
 - more

Kind: fix
Test: a.py,
 b.py
Test: c.py
Forwarded: https://example.org/1
---
 file | 2 +-
"""


def test_header():
    header = parse_header(HEADER)
    assert header.subject == "[Cache] A long subject that goes on"
    assert header.author == "Jürgen <j@example.org>"
    assert header.body == "Why: because.\n\n - a list: yes\n - more"
    assert header.all("Test") == ["a.py, b.py", "c.py"]
    assert header.get("Forwarded") == "https://example.org/1"
    assert header.public_message() == (
        "[Cache] A long subject that goes on\n\nWhy: because.\n\n - a list: yes\n - more\n\n"
        "Kind: fix\nTest: a.py, b.py\nTest: c.py\n"
    )


def test_text_is_no_trailer():
    header = parse_header("Subject: x\n\nKind: fix\nand then text\n")
    assert header.trailers == () and header.body == "Kind: fix\nand then text"


SOURCE = """
import os.path as p, json
from sglang.b import Imported as Renamed
from .c import *
X = Y = 1
Z: int = 2
(A, (B, *C)) = 1, (2, 3)
if X:
    def conditional(): ...
else:
    other = 1
try:
    import fast
except ImportError:
    fast = None
class K:
    attr = 1
    def method(self):
        self.own = 1
        local = 2
    class Inner:
        deep = 1
def function():
    hidden = 1
"""


@pytest.fixture
def tree(tmp_path):
    files = {
        "sglang/__init__.py": "",
        "sglang/a.py": SOURCE,
        "sglang/c.py": "starred = 1\nfrom sglang.a import *\n",
        "sglang/native.cpython-311-x86_64-linux-gnu.so": "",
        "sglang/space/inner.py": "",
    }
    toys.write_tree(tmp_path, files)
    return DirTree(tmp_path, strip="python/")


NAMES = "p json Renamed X Y Z A B C conditional other fast K function starred"


@pytest.mark.parametrize(
    "name", NAMES.split() + ["K.attr", "K.method", "K.own", "K.Inner.deep"]
)
def test_symbols_found(tree, name):
    assert symbol_exists(tree, "sglang.a", name)


@pytest.mark.parametrize(
    "name", ["os", "Imported", "hidden", "local", "K.local", "K.deep", "Q.x"]
)
def test_symbols_not_found(tree, name):
    assert not symbol_exists(tree, "sglang.a", name)


def test_modules_count_as_names(tree):
    assert symbol_exists(tree, "sglang", "a")
    assert symbol_exists(tree, "sglang", "native")
    assert symbol_exists(tree, "sglang.native", "anything")
    assert symbol_exists(tree, "sglang", "space")
    assert not symbol_exists(tree, "sglang.missing", "x")


def test_engine_imports():
    source = b"import sglang.a\nimport os\nfrom sglang.b import c, d as e\nfrom . import f\n"
    assert engine_imports(source) == [
        ("sglang.a", None),
        ("sglang.b", "c"),
        ("sglang.b", "d"),
    ]
    assert engine_imports(b"from .x import y", "sglang.p.q") == [("sglang.p.x", "y")]


@pytest.mark.parametrize(
    "text", ["", "soon", "symbol a.b", "symbol :x", "text a", "version > 1"]
)
def test_bad_conditions(text):
    with pytest.raises(ConditionError):
        parse_condition(text)


def test_versions_compare_as_numbers():
    assert parse_condition("version >= 0.5.23").holds(None, "0.5.100")
    assert not parse_condition("version >= 0.5.23").holds(None, "0.5.3")
    assert not parse_condition("version >= 0.5.23").holds(None, None)
    assert version_key("v1.2.post1") == (1, 2)
    assert parse_symbol("a.b:C.d") == ("a.b", "C.d")


# --- generated files --------------------------------------------------------------------


def test_index(tool, series, capsys):
    readme = series.directory / "README.md"
    assert tool("index", "--check") == 1
    assert "patchtool.py index" in capsys.readouterr().err
    assert not readme.exists()
    assert tool("index") == Exit.OK
    assert tool("index", "--check") == Exit.OK
    text = readme.read_text()
    row = next(line for line in text.splitlines() if "[step-hook.patch]" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "1" and cells[3] == "fix" and cells[4] == "1 + 1"
    assert cells[5] == f"`{CACHE}`" and cells[6] == "no"
    assert cells[7] == "symbol sglang.srt.cache:notify_upstream"
    assert cells[8:] == ["sam/srt/upstream.py", "test/test_toy.py"]
    assert "3 patches, 6 lines in all." in text
    readme.write_text(text + "edited by hand\n")
    assert tool("index", "--check") == 1


def test_lock(tool, series, site):
    lock = series.directory / "BASE.sha256"
    expected = lock.read_text()
    assert tool("lock", "--check", "--target", site) == Exit.OK
    lock.write_text("")
    assert tool("lock", "--check", "--target", site) == 1
    assert tool("lock", "--target", site) == Exit.OK
    assert lock.read_text() == expected
    tool("apply", "--target", site)
    assert tool("lock", "--check", "--target", site) == Exit.OK


def test_lock_refuses_what_the_wheel_lacks(tool, series, site):
    base = {**series.top, "python/sglang/none.py": "A = 1\n"}
    diff = toys.diff_text(base, {**base, "python/sglang/none.py": "A = 2\n"})
    series.add_text("none.patch", toys.patch_text(diff))
    assert tool("lock", "--target", site) == Exit.DOES_NOT_APPLY
