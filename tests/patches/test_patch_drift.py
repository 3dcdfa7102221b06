"""check_drift: every class, on toy upstreams."""

from __future__ import annotations

import json
import zipfile

import check_drift
import patch_toys as toys
import pytest
from patch_toys import CACHE, SERVER


@pytest.fixture
def drift(series, site, tmp_path, capsys):
    """Writes `files` as the newer upstream; gives the drift per patch, and the reasons."""

    def run(files, *args, overlay="", version="9.0.0"):
        newer = toys.make_wheel(tmp_path / f"newer-{version}", files, version=version)
        module = tmp_path / "overlay.py"
        module.write_text(overlay)
        command = ["--against", str(newer), "--patches", str(series.directory), "--json"]
        command += ["--base", str(site), "--overlay", str(module), *args]
        capsys.readouterr()
        code = check_drift.main(command)
        value = json.loads(capsys.readouterr().out)
        rows = {row["name"].removesuffix(".patch"): row for row in value["rows"]}
        harmless = all(r["drift"] in ("APPLIES", "OFFSET", "MERGED") for r in rows.values())
        assert code == (0 if harmless else 1)
        assert value["version"] == version
        return {n: r["drift"] for n, r in rows.items()}, {
            n: r["reasons"] for n, r in rows.items()
        }

    return run


FINE = {
    "step-hook": "APPLIES",
    "server-line": "APPLIES",
    "step-two": "APPLIES",
    "(overlay imports)": "APPLIES",
}


def test_same(drift):
    assert drift(toys.BASE)[0] == FINE


def test_against_a_patched_base(drift, tool, site):
    tool("apply", "--target", site)
    assert drift(toys.BASE)[0] == FINE


def test_offset(drift):
    moved = {**toys.BASE, SERVER: "NEW = 1\n" + toys.BASE[SERVER]}
    found, reasons = drift(moved)
    assert found == {**FINE, "server-line": "OFFSET"}
    assert reasons["server-line"] == ["largest offset +1 lines"]


def test_conflict_names_the_place(drift):
    files = toys.edited(toys.BASE, SERVER, "LINE_19 = 19\n", "LINE_19 = None\n")
    found, reasons = drift(files)
    assert found == {**FINE, "server-line": "CONFLICT"}
    assert "should be 'LINE_19 = 19' but is 'LINE_19 = None'" in reasons["server-line"][0]


def test_conflict_does_not_hide_the_others(drift):
    """What builds on a patch in conflict is in conflict too, the rest is not."""
    files = toys.edited(toys.BASE, CACHE, "        return 3\n", "        return 33\n")
    found, _ = drift(files)
    assert found == {**FINE, "step-hook": "CONFLICT", "step-two": "CONFLICT"}


def test_file_gone(drift):
    files = {path: text for path, text in toys.BASE.items() if path != SERVER}
    found, reasons = drift(files)
    assert found["server-line"] == "CONFLICT"
    assert "does not exist" in reasons["server-line"][0]


def test_merged_word_for_word(drift, series):
    found, reasons = drift({**toys.BASE, SERVER: "NEW = 1\n" + series.top[SERVER]})
    assert found == {**FINE, "server-line": "MERGED"}
    assert reasons["server-line"] == ["upstream holds this change already"]


def test_merged_one_after_the_other(drift, series):
    found, _ = drift(series.tops[0])
    assert found == {**FINE, "step-hook": "MERGED"}


@pytest.mark.parametrize(
    ("condition", "extra"),
    [
        ("symbol sglang.srt.cache:announced", "def announced():\n    pass\n"),
        ("symbol sglang.srt.cache:Other.step", "class Other:\n    def step(self): ...\n"),
        ("text python/sglang/srt/cache.py: announced here", "# announced here\n"),
        ("version >= 9", ""),
    ],
)
def test_merged_because_remove_when_holds(drift, series, condition, extra):
    path = series.directory / "server-line.patch"
    text = path.read_text()
    path.write_text(text.replace("symbol sglang.srt.cache:notify_upstream", condition))
    files = {**toys.BASE, CACHE: toys.BASE[CACHE] + extra}
    found, reasons = drift(files)
    assert found["server-line"] == "MERGED"
    assert reasons["server-line"] == [f"Remove-When holds: {condition}"]


@pytest.fixture
def using(series):
    """A fourth patch whose added lines use an import, a module name and an attribute."""
    body = "\n\ndef total(self):\n    from sglang.srt.server import LINE_1\n"
    body += "    return LIMIT + LINE_1 + self.size\n"
    series.add("using.patch", {**series.top, CACHE: series.top[CACHE] + body})


def test_symbols_all_there(drift, using):
    assert drift(toys.BASE)[0]["using"] == "APPLIES"


@pytest.mark.parametrize(
    ("path", "old", "new", "reason"),
    [
        (SERVER, "LINE_1 = 1\n", "LINE_ONE = 1\n", "imports sglang.srt.server:LINE_1"),
        (CACHE, "LIMIT = 10\n", "BOUND = 10\n", "uses LIMIT"),
        (CACHE, "        self.size = 0\n", "        self.used = 0\n", "uses self.size"),
    ],
)
def test_symbol_that_a_patch_uses(drift, using, series, path, old, new, reason):
    found, reasons = drift(toys.edited(toys.BASE, path, old, new))
    assert found["using"] == "SYMBOL"
    assert any(reason in text for text in reasons["using"])


def test_symbol_remove_when_cannot_be_seen(drift, series):
    path = series.directory / "server-line.patch"
    text = path.read_text().replace("sglang.srt.cache:notify", "sglang.srt.gone:notify")
    path.write_text(text)
    found, reasons = drift(toys.BASE)
    assert found["server-line"] == "SYMBOL"
    assert reasons["server-line"] == ["Remove-When: module sglang.srt.gone is gone"]


def test_result_that_does_not_compile(drift):
    files = {**toys.BASE, SERVER: toys.BASE[SERVER] + "def broken(:\n"}
    assert drift(files)[0]["server-line"] == "SYMBOL"


OVERLAY = """
import sglang.srt.cache as cache
from sglang.srt.cache import Cache, tail
from sglang.srt import server
from sglang.srt.extra.hooks import HOOKS
def late():
    from sglang.srt.server import LINE_5
"""


def test_overlay_names(drift):
    """Names that our own patches bring count as there."""
    assert drift(toys.BASE, overlay=OVERLAY)[0] == FINE


def test_overlay_name_lost(drift):
    files = toys.edited(toys.BASE, CACHE, "def tail():", "def end():")
    files = toys.edited(files, SERVER, "LINE_5 = 5\n", "LINE_FIVE = 5\n")
    found, reasons = drift(files, overlay=OVERLAY)
    assert found["(overlay imports)"] == "SYMBOL"
    lost = ["sglang.srt.cache:tail is gone", "sglang.srt.server:LINE_5 is gone"]
    assert reasons["(overlay imports)"] == lost


def test_overlay_member_lost(drift):
    overlay = 'USED_MEMBERS: dict[str, tuple[str, ...]] = {"sglang.srt.cache:Cache": ("gone",)}'
    found, reasons = drift(toys.BASE, overlay=overlay)
    assert found["(overlay imports)"] == "SYMBOL"
    assert reasons["(overlay imports)"] == ["sglang.srt.cache:Cache.gone is gone"]


def test_overlay_module_lost(drift):
    files = {path: text for path, text in toys.BASE.items() if path != SERVER}
    _, reasons = drift(files, overlay=OVERLAY)
    assert "sglang.srt:server is gone" in reasons["(overlay imports)"]


def against(series, location, *args):
    return check_drift.main(
        ["--overlay", "none", "--against", str(location), "--patches", str(series.directory), *args]
    )


def test_table_and_wheel_file(series, site, tmp_path, capsys):
    wheel = tmp_path / "sglang-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in toys.BASE.items():
            archive.writestr(path.removeprefix("python/"), text)
    assert against(series, wheel, "--base", str(site)) == 0
    out = capsys.readouterr().out
    assert "(version 1.2.3)" in out and "  APPLIES   step-hook.patch" in out


def test_checkout(series, site, tmp_path, capsys):
    checkout = toys.make_checkout(tmp_path / "checkout")
    assert against(series, checkout, "--base", str(site)) == 0
    assert "(version v1.2.3)" in capsys.readouterr().out


def test_version_is_taken_from_the_cache(series, site, tmp_path, capsys):
    cache = tmp_path / "cache"
    cache.mkdir()
    with zipfile.ZipFile(cache / "sglang-1.2.4-py3-none-any.whl", "w") as archive:
        for path, text in toys.BASE.items():
            archive.writestr(path.removeprefix("python/"), text)
    assert against(series, "1.2.4", "--base", str(site), "--cache", str(cache)) == 0


def test_version_is_fetched_with_pip(series, site, tmp_path, capsys):
    """A stand-in for the interpreter records how pip is called and brings the wheel."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" > "$0.args"\n'
        f"cp {tmp_path}/made.whl {tmp_path}/cache/sglang-1.2.5-py3-none-any.whl\n"
    )
    python.chmod(0o755)
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
        for path, text in toys.BASE.items():
            archive.writestr(path.removeprefix("python/"), text)
    args = ("--base", str(site), "--cache", str(tmp_path / "cache"), "--python", str(python))
    assert against(series, "1.2.5", *args) == 0
    called = (tmp_path / "python.args").read_text()
    assert "-m pip download" in called and "--no-deps" in called and "sglang==1.2.5" in called


def test_usage(series, site, tmp_path, capsys):
    assert against(series, "not/there", "--base", str(site)) == 2
    assert against(series, tmp_path, "--base", str(site)) == 2
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    args = (
        "--base",
        str(site),
        "--cache",
        str(tmp_path / "c"),
        "--python",
        f"{tmp_path}/python",
    )
    assert against(series, "1.2.6", *args) == 2
