"""lint_patches: a clean series passes, and each rule has its finding."""

from __future__ import annotations

import lint_patches
import patch_toys as toys
import pytest
from patch_toys import CACHE, SERVER

NEW = "python/sglang/srt/extra/more.py"


@pytest.fixture
def lint(series, site, tool, capsys):
    """Runs the lint; the generated files are brought up to date first unless told not to."""

    def run(*args, generate=True, code=1):
        if generate:
            for command in (["index"], ["lock", "--target", site]):
                tool(*command)
        capsys.readouterr()
        found = lint_patches.main(
            ["--patches", str(series.directory), "--base", str(site), *args]
        )
        out = capsys.readouterr().out
        assert found == code, out
        return out

    return run


def rewrite(series, old, new, name="server-line.patch"):
    path = series.directory / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_clean(lint):
    assert lint(code=0) == ""


def test_clean_on_a_patched_target(lint, tool, site):
    tool("apply", "--target", site)
    assert lint(code=0) == ""


def test_clean_against_a_checkout_or_a_bare_directory(lint, tmp_path, series, capsys):
    toys.write_tree(tmp_path / "bare", toys.BASE)
    assert lint("--base", str(tmp_path / "bare"), code=0) == ""


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("Subject: [PATCH] Tell who asked\n", "", "no Subject"),
        (toys.BODY, "Because.", "the body must say why"),
        ("Kind: fix", "Kind: feature", "none of seam, fix, backport"),
        ("Kind: fix\n", "", "trailer Kind is missing"),
        ("Upstream-Base: v1.2.3\n", "", "trailer Upstream-Base is missing"),
        ("Upstream-Base: v1.2.3", "Upstream-Base: v1.2.2", "not v1.2.3"),
        ("Forwarded: no\n", "", "trailer Forwarded is missing"),
        ("Forwarded: no", "Forwarded: not yet", "one reference"),
        (
            "Remove-When: symbol sglang.srt.cache:notify_upstream\n",
            "",
            "Remove-When is missing",
        ),
        ("symbol sglang.srt.cache:notify_upstream", "when merged", "is none of"),
        ("symbol sglang.srt.cache:notify_upstream", "symbol nothing", "not MODULE:NAME"),
        ("symbol sglang.srt.cache:notify_upstream", "version >= 1.2", "holds already"),
        (
            "symbol sglang.srt.cache:notify_upstream",
            "symbol sglang.srt.cache:Cache.size",
            "holds",
        ),
        ("symbol sglang.srt.cache:notify_upstream", f"text {SERVER}: LINE_7 = 7", "holds"),
        ("Used-By: sam/srt/upstream.py\n", "", "trailer Used-By is missing"),
        ("Test: test/test_toy.py\n", "", "trailer Test is missing"),
        ("Test: test/test_toy.py", "Test: test/none.py", "Test test/none.py is neither"),
        ("Last-Update: 2026-01-02\n", "", "trailer Last-Update is missing"),
        ("Last-Update: 2026-01-02", "Last-Update: 2 Jan 2026", "not YYYY-MM-DD"),
        ("Forwarded: no", "Forwarded: no\nDepends-On: step-two.patch", "not before it"),
        ("Forwarded: no", "Forwarded: no\nMarker: nonsense", "Marker 'nonsense' is not"),
        ("Forwarded: no", "Forwarded: no\nMarker: sglang.srt.server:NEW", "not there after"),
        (
            "Forwarded: no",
            "Forwarded: no\nMarker: sglang.srt.server:LINE_3",
            "without the patch",
        ),
        ("The cache has no way", "sam has no way", "body mentions the overlay"),
        ("Tell who asked", "Tell agent-sam", "Subject mentions the overlay"),
        ("+LINE_20 = 21", "+LINE_20 = 21  # for SAM", "mentions the overlay"),
        ("+LINE_20 = 21", "+LINE_20 = 21  ", "trailing whitespace"),
        ("+LINE_20 = 21", "+LINE_20 = = 21", "does not compile"),
        (" LINE_19 = 19", " LINE_19 = 20", "does not apply after its predecessors"),
    ],
)
def test_one_finding(lint, series, old, new, finding):
    rewrite(series, old, new)
    # index is generated again, so that only the finding at hand is left
    out = lint()
    assert finding in out
    assert len({line.split(":")[0] for line in out.splitlines()}) == 1, out


def test_words_that_only_look_like_ours(lint, series):
    rewrite(series, "+LINE_20 = 21", "+LINE_20 = 21  # sampling, same, samples")
    assert lint(code=0) == ""


def test_context_of_upstream_may_say_anything(tmp_path):
    base = {**toys.BASE, SERVER: toys.BASE[SERVER].replace("LINE_19 = 19", "SAM = 19")}
    made = toys.ToyPatches(tmp_path / "p", base)
    after = toys.edited(base, SERVER, "LINE_20 = 20\n", "LINE_20 = 21\n")
    made.add("server-line.patch", {**after, "test/test_toy.py": "pass\n"})
    toys.write_tree(tmp_path / "bare", base)
    args = ["--patches", str(made.directory), "--base", str(tmp_path / "bare")]
    assert lint_patches.main(args) == 1
    import patchtool

    assert patchtool.main(["index", "--patches", str(made.directory)]) == 0
    assert lint_patches.main(args) == 0


def test_warnings_do_not_fail_unless_strict(lint, series):
    rewrite(series, "Kind: fix", "Kind: seam")
    assert "warning: a seam without Marker" in lint(code=0)
    lint("--strict", code=1)


def test_unknown_trailer_is_a_warning(lint, series):
    rewrite(series, "Forwarded: no", "Forwarded: no\nRemoved-When: never\nSigned-off-by: me")
    assert lint(code=0) == "server-line.patch: warning: trailer Removed-When is unknown\n"


def grown(series, lines, path=SERVER):
    text = series.top.get(path, "")
    return {**series.top, path: text + "".join(f"MORE_{n} = {n}\n" for n in range(lines))}


@pytest.mark.parametrize(
    ("lines", "path", "code", "finding"),
    [
        (31, SERVER, 0, "warning: 31 changed lines"),
        (81, SERVER, 1, "81 changed lines, at most 80"),
        (200, NEW, 0, ""),
        (201, NEW, 1, "201 lines of new files"),
        (300, "test/test_more.py", 0, ""),
    ],
)
def test_size(lint, series, lines, path, code, finding):
    series.add("more.patch", grown(series, lines, path))
    out = lint(code=code)
    assert finding in out
    assert len(out.splitlines()) == bool(finding)


def test_existing_files(tmp_path):
    base = {f"python/sglang/f{n}.py": "A = 1\nB = 2\n" for n in range(5)}
    for count, code in ((3, 0), (5, 1)):
        made = toys.ToyPatches(tmp_path / f"p{count}", base)
        paths = list(base)[:count]
        after = base | {path: "A = 1\nB = 3\n" for path in paths}
        made.add("wide.patch", {**after, "test/test_toy.py": "pass\n"})
        from patchlib.rules import lint
        from patchlib.series import load_series

        found = [
            f for f in lint(load_series(made.directory), toys.REPO) if f.place != "README.md"
        ]
        assert [(f.warning, f"{count} existing files" in f.text) for f in found] == [
            (not code, True)
        ]


def test_series_limits(lint, series):
    for n in range(3):
        series.add(f"big-{n}.patch", grown(series, 180, f"python/sglang/srt/big_{n}.py"))
    assert "series: 54" in lint()
    for n in range(5):
        series.add(f"small-{n}.patch", grown(series, 1, f"python/sglang/srt/small_{n}.py"))
    assert "series: 11 patches, at most 10" in lint()


def test_series_lists_exactly_what_is_there(lint, series):
    (series.directory / "forgotten.patch").write_text("x")
    assert "forgotten.patch lies in patches/ but is not listed" in lint()
    (series.directory / "forgotten.patch").unlink()
    names = series.directory / "series"
    names.write_text(names.read_text() + "server-line.patch\n")
    assert "server-line.patch is listed twice" in lint()


def test_listed_but_absent(lint, series):
    (series.directory / "server-line.patch").unlink()
    lint(generate=False, code=2)


def test_names(lint, series):
    series.add("Bad_Name.patch", grown(series, 1))
    assert "Bad_Name.patch: names are lower-case" in lint()


def test_generated_files(lint, series):
    lint(code=0)
    rewrite(series, "Tell who asked", "Tell who asks")
    assert lint(generate=False) == "README.md: out of date: run 'patchtool.py index'\n"
    lint(code=0)
    (series.directory / "BASE.sha256").write_text("")
    assert lint(generate=False) == "BASE.sha256: out of date: run 'patchtool.py lock'\n"


def test_paths_outside(lint, series):
    series.add("docs.patch", {**series.top, "docs/x.md": "x\n"})
    assert "docs/x.md: only python/sglang/ and test/" in lint()


def test_existing_upstream_test_cannot_be_proven(tmp_path):
    base = {**toys.BASE, "test/test_old.py": "A = 1\n"}
    made = toys.ToyPatches(tmp_path / "p", base)
    made.add("old-test.patch", {**base, "test/test_old.py": "A = 2\n"}, Test="test/test_old.py")
    from patchlib.rules import lint
    from patchlib.series import load_series

    found = lint(load_series(made.directory), toys.REPO)
    assert any("the wheel cannot prove it" in f.text for f in found)


def test_every_prefix_must_apply(lint, series):
    """The third needs the first: listed before it, it is found."""
    names = ["step-two.patch", "step-hook.patch", "server-line.patch"]
    (series.directory / "series").write_text("\n".join(names) + "\n")
    out = lint()
    assert f"step-two.patch: does not apply after its predecessors: {CACHE}" in out
