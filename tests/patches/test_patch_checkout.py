"""apply and revert on a checkout of upstream."""

from __future__ import annotations

import patch_toys as toys
import pytest
from patch_toys import CACHE, SERVER
from patchlib.errors import Exit


@pytest.fixture
def checkout(tmp_path):
    return toys.make_checkout(tmp_path / "checkout")


def test_round_trip_with_tests(tool, series, checkout):
    before = toys.snapshot(checkout)
    assert tool("status", "--target", checkout) == Exit.NOT_APPLIED
    assert tool("apply", "--target", checkout) == Exit.OK
    for path, text in series.top.items():
        assert (checkout / path).read_text() == text
    assert ".sam_patches" not in toys.git(checkout, "status", "--porcelain", "-uall")
    assert tool("check", "--target", checkout) == Exit.OK
    assert tool("apply", "--target", checkout) == Exit.OK
    assert tool("revert", "--target", checkout) == Exit.OK
    assert toys.snapshot(checkout) == before
    assert toys.git(checkout, "status", "--porcelain") == ""


def test_same_result_as_git_apply(tool, series, checkout, tmp_path):
    other = toys.make_checkout(tmp_path / "other")
    for name in series.names:
        toys.git(other, "apply", str(series.directory / name))
    tool("apply", "--target", checkout)
    assert toys.snapshot(checkout) == toys.snapshot(other)


def test_modified_file(tool, checkout, capsys):
    (checkout / SERVER).write_text("mine\n")
    assert tool("apply", "--target", checkout) == Exit.MODIFIED
    assert f"git checkout v{toys.VERSION} -- {SERVER}" in capsys.readouterr().err


def test_committed_change_of_a_touched_file(tool, checkout):
    (checkout / SERVER).write_text(toys.BASE[SERVER] + "# later\n")
    toys.git(checkout, "commit", "-qam", "later")
    assert tool("apply", "--target", checkout) == Exit.MODIFIED


def test_commits_on_top_that_do_not_matter(tool, checkout):
    (checkout / "README.md").write_text("mine\n")
    toys.git(checkout, "add", "README.md")
    toys.git(checkout, "commit", "-qm", "mine")
    assert tool("apply", "--target", checkout) == Exit.OK


def test_wrong_branch(tool, checkout):
    toys.git(checkout, "checkout", "-q", "--orphan", "elsewhere")
    toys.git(checkout, "commit", "-qm", "elsewhere")
    assert tool("apply", "--target", checkout) == Exit.WRONG_VERSION


def test_without_the_tag_the_hashes_decide(tool, tmp_path):
    plain = toys.make_checkout(tmp_path / "plain", tag=None)
    assert tool("apply", "--target", plain) == Exit.OK


def test_base_without_proof(tool, series, checkout, capsys):
    (series.directory / "BASE.sha256").unlink()
    assert tool("apply", "--target", checkout) == Exit.MODIFIED
    assert "patchtool.py lock" in capsys.readouterr().err


def test_sources_below_another_repository(tool, series, tmp_path):
    """Not the top of a repository: nothing may be concluded from the one above."""
    outer = toys.make_checkout(tmp_path / "outer", {"x.py": "1\n"}, tag=None)
    toys.write_tree(outer / "nested", toys.BASE)
    assert tool("apply", "--target", outer / "nested") == Exit.WRONG_VERSION
    assert (outer / "nested" / CACHE).read_text() == toys.BASE[CACHE]


def test_nested_checkout_below_another_repository(tool, tmp_path):
    outer = toys.make_checkout(tmp_path / "outer", {"x.py": "1\n"}, tag=None)
    nested = toys.make_checkout(outer / "nested")
    assert tool("apply", "--target", nested) == Exit.OK


def test_git_variables_do_not_mislead(tool, checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert tool("apply", "--target", checkout) == Exit.OK
