"""`sam` as it is typed: help, exit codes, what it imports, what the documents say of it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sam.cli import main
from sam.cli.errors import MEANINGS, Exit

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").glob("*.md"))]
GUIDE = REPO / "docs" / "cli.md"
PASSED_ON = ("doctor", "patch", "bench", "sim")


def run(*command):
    done = subprocess.run(
        [sys.executable, "-m", "sam.cli", *command], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def commands_in(path):
    """Lines of code blocks that start with `sam `, without their comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.M | re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(r"sam [a-z]", line)]


@pytest.mark.parametrize(
    "words",
    [w for path in DOCUMENTS for w in commands_in(path) if w[0] not in PASSED_ON],
    ids=" ".join,
)
def test_documented_commands_parse(words, capsys):
    """As far as the first thing that needs a server: nobody listens on port 9."""
    if "request.json" in words:
        words = [str(REPO / "tests" / "unit" / "cli_request.json") if w == "request.json" else w
                 for w in words]  # fmt: skip
    code = main([*words, "--url", "http://127.0.0.1:9"])
    assert code == Exit.NO_SERVER, capsys.readouterr().err


def test_the_guide_shows_every_command():
    shown = {tuple(words[:2]) if words[0] in ("hint", "patch") else (words[0],)
             for words in commands_in(GUIDE)}  # fmt: skip
    code, text, _ = run("--help")
    listed = set(re.findall(r"^│ ([a-z]+) ", text, re.M))
    assert code == 0 and len(listed) >= 9
    for group in ("hint", "patch"):
        inner = re.findall(r"^│ ([a-z]+) ", run(group, "--help")[1], re.M)
        listed = (listed - {group}) | {(group, name) for name in inner}
    assert shown == {one if isinstance(one, tuple) else (one,) for one in listed}


def test_exit_codes_are_documented():
    text, (_, shown, _) = GUIDE.read_text(), run("--help")
    for code, meaning in MEANINGS.items():
        assert f"| {code.value} | {meaning} |" in text
        assert re.search(rf"^ {code.value} +{re.escape(meaning[:20])}", shown, re.M)
    assert set(MEANINGS) == set(Exit)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_both_languages_show_the_same():
    english, chinese = ((REPO / name).read_text() for name in ("README.md", "README.zh.md"))
    blocks = re.compile(r"^```\w*\n.*?^```", re.M | re.S)
    assert blocks.findall(english) == blocks.findall(chinese) and len(blocks.findall(english)) > 5
    limits = [
        len(re.findall(r"^\* ", text[text.index(title) :], re.M))
        for text, title in ((english, "## Limits today"), (chinese, "## 目前的限制"))
    ]
    assert limits[0] == limits[1] >= 4


def test_remote_commands_import_neither_sglang_nor_torch():
    script = (
        "import sys; from sam.cli import main;"
        "code = main(['sessions', '--url', 'http://127.0.0.1:9']);"
        "print(code, [m for m in ('sglang', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == f"{int(Exit.NO_SERVER)} []", done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-command"],
        ["sessions", "--state", "asleep"],
        ["hint", "expect", "x"],
        ["hint", "retain", "x", "--ttl", "4000"],
        ["hint", "offload", "x", "--release", "later"],
        ["hint", "evict", "x", "--messages", "3:1"],
        ["hint", "evict", "x", "--messages", "1:"],
        ["sessions", "--url", "localhost:30000"],
        ["top", "--interval", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage(words, capsys):
    assert main(words) == Exit.USAGE
    assert capsys.readouterr().err


def test_version(capsys):
    from sam import __version__

    assert main(["--version"]) == Exit.OK
    assert capsys.readouterr().out == f"sam {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["doctor", "--help"], "usage: python -m sam.doctor"),
        (["patch", "status", "--help"], "--up-to PATCH"),
        (["bench", "--help"], "usage: python -m sam.bench"),
        (["sim", "--help"], "--policy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_passed_on(words, expected):
    code, out, err = run(*words)
    assert code == 0 and expected in out + err


def test_the_exit_code_is_that_of_the_other_program():
    assert run("patch", "status", "--target", "/nonexistent")[0] == 3
    assert run("doctor", "--no-such-option")[0] == 2
