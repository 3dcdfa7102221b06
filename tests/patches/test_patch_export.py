"""export: one branch per patch, the same commits every time."""

from __future__ import annotations

import patch_toys as toys
import pytest
from patch_toys import CACHE, SERVER
from patchlib.errors import Exit

NAMES = ["sam/step-hook", "sam/server-line", "sam/step-two"]


@pytest.fixture
def checkout(tmp_path):
    return toys.make_checkout(tmp_path / "checkout")


def heads(checkout):
    lines = toys.git(
        checkout, "for-each-ref", "--format=%(refname:short) %(objectname)", "refs/heads"
    ).splitlines()
    return dict(line.split() for line in lines)


def parent(checkout, name):
    return toys.git(checkout, "rev-parse", f"{name}^").strip()


def test_branches_stand_where_they_apply(tool, series, checkout):
    before = toys.snapshot(checkout)
    assert tool("export", checkout) == Exit.OK
    found = heads(checkout)
    assert set(found) == {"main", *NAMES}
    assert parent(checkout, NAMES[0]) == found["main"]
    assert parent(checkout, NAMES[1]) == found["main"]
    # The third needs the first: it stands on all before it.
    assert toys.git(checkout, "rev-list", "--count", f"main..{NAMES[2]}").strip() == "3"
    assert toys.git(checkout, "show", f"{NAMES[2]}:{CACHE}") == series.top[CACHE]
    assert toys.git(checkout, "show", f"{NAMES[1]}:{CACHE}") == toys.BASE[CACHE]
    assert "LINE_20 = 21" in toys.git(checkout, "show", f"{NAMES[1]}:{SERVER}")
    assert toys.git(checkout, "show", f"{NAMES[0]}:test/test_toy.py")
    assert toys.snapshot(checkout) == before
    assert toys.git(checkout, "status", "--porcelain") == ""


def test_message_and_author(tool, checkout):
    tool("export", checkout)
    shown = toys.git(
        checkout, "log", "-1", "--format=%an <%ae> %ad%n%B", "--date=iso", NAMES[0]
    )
    assert shown.startswith("Toy Author <toy@example.org> 2026-01-02 12:00:00 +0000\n")
    assert "Tell who asked\n\nThe cache has no way" in shown
    for private in ("Used-By", "Last-Update", "Forwarded", "Remove-When", "Marker", "[PATCH]"):
        assert private not in shown


def test_deterministic(tool, checkout, tmp_path):
    tool("export", checkout)
    first = heads(checkout)
    assert tool("export", checkout) == Exit.OK
    assert heads(checkout) == first
    toys.git(checkout, "branch", "-D", *NAMES)
    assert tool("export", checkout) == Exit.OK
    assert heads(checkout) == first


def test_prefix(tool, checkout):
    assert tool("export", checkout, "--prefix", "pr-") == Exit.OK
    assert "pr-step-hook" in heads(checkout)


def test_depends_on_forces_stacking(tool, series, checkout):
    path = series.directory / "server-line.patch"
    text = path.read_text().replace("Forwarded:", "Depends-On: step-hook.patch\nForwarded:")
    path.write_text(text)
    tool("export", checkout)
    assert parent(checkout, NAMES[1]) == heads(checkout)[NAMES[0]]


def test_branches_of_others_are_kept(tool, checkout, capsys):
    toys.git(checkout, "branch", NAMES[1])
    assert tool("export", checkout) == Exit.USAGE
    assert "--force" in capsys.readouterr().err
    assert set(heads(checkout)) == {"main", NAMES[1]}
    assert tool("export", checkout, "--force") == Exit.OK
    toys.git(checkout, "checkout", "-q", "-B", NAMES[0], "main")
    assert tool("export", checkout, "--force") == Exit.USAGE


def test_dirty_checkout(tool, checkout):
    (checkout / SERVER).write_text("mine\n")
    assert tool("export", checkout) == Exit.MODIFIED


def test_wrong_version(tool, series, tmp_path, checkout):
    toys.git(checkout, "commit", "-q", "--allow-empty", "-m", "later")
    assert tool("export", checkout) == Exit.WRONG_VERSION
    other = {**toys.BASE, SERVER: toys.BASE[SERVER] + "# other\n"}
    elsewhere = toys.make_checkout(tmp_path / "other", other, tag=None)
    assert tool("export", elsewhere) == Exit.WRONG_VERSION


def test_no_date(tool, series, checkout):
    path = series.directory / "server-line.patch"
    path.write_text(path.read_text().replace("Last-Update: 2026-01-02\n", ""))
    assert tool("export", checkout) == Exit.USAGE


def test_no_repository(tool, tmp_path):
    assert tool("export", tmp_path) == Exit.USAGE


def test_no_identity(tool, checkout, monkeypatch):
    toys.git(checkout, "config", "--unset", "user.email")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    assert tool("export", checkout) == Exit.USAGE
