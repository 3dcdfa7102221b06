"""Whether a command in a document could be run: its program, subcommand and options exist.

Owns one check per program. Must never run what a command does; `tests/e2e/test_docs_live.py`
runs those that are quick.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import tomllib
from functools import cache

import typer

from tests.unit.docs_pages import REPO

SHELL = ("", "bash", "sh", "console")
NOT_OURS = ("smg.launch_router",)  # not installed where tests run: options are not looked at
_PLACEHOLDER = re.compile(r"[A-Z_]+(\.[a-z]+)?|…|.*….*|\$\w+.*")


def commands(text: str) -> list[list[str]]:
    """The simple commands of a block as words, without comments, loops and assignments."""
    plain = _without_comments(text.replace("\\\n", " "))
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    found: list[list[str]] = [[]]
    for token in lexer:
        if set(token) <= set(";&|\n"):
            found.append([])
        else:
            found[-1].append(token)
    return [words for words in map(_simple, found) if words]


def _simple(words: list[str]) -> list[str]:
    """Without what a loop or an assignment puts before a command."""
    while words and (words[0] in ("do", "$") or re.fullmatch(r"\w+=.*", words[0])):
        words = words[1:]
    return [] if words[:1] in (["for"], ["done"]) else words


def _without_comments(text: str) -> str:
    quote, before, kept = "", "\n", []
    comment = False
    for char in text:
        comment = (comment or (char == "#" and not quote and before.isspace())) and char != "\n"
        if not comment:
            kept.append(char)
            if quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
        before = char
    return "".join(kept)


def problem(words: list[str]) -> str:
    """Why this command could not be run; empty if it could."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "export":
        return ""
    if program in ("python", "python3") and rest[:1] == ["-m"]:
        return _module(rest[1], rest[2:])
    if program in ("python", "python3") and rest and rest[0].endswith(".py"):
        program, rest = rest[0], rest[1:]
    if (REPO / program).is_file():
        return _script(program, rest)
    checks = {"sam": _sam, "make": _make, "pip": _pip, "curl": _nothing, "haproxy": _files}
    check = checks.get(program)
    if check is None:
        return f"no check for {program}: add one, or mark the block as not run"
    return check(rest)


def _nothing(rest: list[str]) -> str:
    return ""


def _files(rest: list[str]) -> str:
    """Of a program that is not ours: the files of the repository that it is given are there."""
    missing = [word for word in rest if "/" in word and not (REPO / word).exists()]
    return f"no such files: {missing}" if missing else ""


def _make(rest: list[str]) -> str:
    verbs = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text(), re.M))
    return "" if set(rest) <= verbs else f"no such verb: {rest}"


def _pip(rest: list[str]) -> str:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = {name for word in rest for name in re.findall(r"\[(\w+)\]", word)}
    if not extras <= set(project["optional-dependencies"]):
        return f"no such extra: {extras}"
    return "" if rest[0] in ("install", "wheel", "uninstall", "download") else f"pip {rest[0]}"


def _script(name: str, rest: list[str]) -> str:
    if not (REPO / name).stat().st_mode & 0o100:
        return f"{name} cannot be executed"
    return _not_in(rest, _help(str(REPO / name), "--help"), "run" in name or "check" in name)


def _not_in(rest: list[str], text: str, words_are_free: bool = False) -> str:
    """Options, and the first word if it is a subcommand, that a help text does not name."""
    options = [word.split("=")[0] for word in rest if word.startswith("-")]
    unknown = [one for one in options if not re.search(rf"(?<![\w-]){one}(?![\w-])", text)]
    if unknown:
        return f"unknown options: {unknown}"
    first = rest[0] if rest and not rest[0].startswith("-") else ""
    if not first or words_are_free or _PLACEHOLDER.fullmatch(first):
        return ""
    return "" if re.search(rf"\b{re.escape(first)}\b", text) else f"unknown word: {first}"


@cache
def _help(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def _module(name: str, rest: list[str]) -> str:
    if name == "sglang.launch_server":
        return _server(rest)
    if name in NOT_OURS:
        return ""
    if name == "sam.bench":
        return _bench(rest)
    if name == "sam.sim":
        return _not_in(rest, _printed("sam.sim.__main__", "--help"), words_are_free=True)
    if name == "sam.doctor":
        return _not_in(rest, _printed("sam.doctor", "--help"))
    return _sam(rest) if name == "sam.cli" else f"no check for python -m {name}"


def _bench(rest: list[str]) -> str:
    from sam.bench.__main__ import BENCHMARKS

    extra = ("attention", "hit_cost")
    name = rest[0] if rest else ""
    if name not in (*BENCHMARKS, *extra, "NAME", "…"):
        return f"no such benchmark: {name}"
    if name in BENCHMARKS:
        return _not_in(rest[1:], _printed("sam.bench.__main__", name, "--help"), True)
    return ""


@cache
def _printed(module: str, *argv: str) -> str:
    """What a module's `main` prints."""
    import importlib

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(list(argv))
    return out.getvalue()


def _server(rest: list[str]) -> str:
    try:
        _, left = _server_parser().parse_known_args(rest)
    except (SystemExit, argparse.ArgumentError) as error:
        return f"SGLang refuses the options: {error}"
    wrong = [word for word in left if not _PLACEHOLDER.fullmatch(word)]
    return f"SGLang does not know {wrong}" if wrong else ""


@cache
def _server_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    from sam.srt.entrypoints.cli_args import add_arguments

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    if "--sam-max-sessions" not in parser._option_string_actions:
        add_arguments(parser)
    for action in parser._actions:
        action.required = False
    return parser


def _sam(rest: list[str]) -> str:
    """Parse as `sam` would, up to where it would do something."""
    from sam.cli.app import app

    if rest[:1] == ["bench"]:
        return _bench(rest[1:])
    if rest[:1] == ["sim"]:
        return _module("sam.sim", rest[1:])
    command, info, context = typer.main.get_command(app), "sam", None
    while True:
        try:
            context = command.make_context(info, list(rest), parent=context)
        except Exception as error:
            return "" if "--help" in rest else f"{type(error).__name__}: {error}"
        except SystemExit:
            return ""
        if not hasattr(command, "commands"):
            return ""
        words = [*context._protected_args, *context.args]
        if not words or words[0] not in command.commands:
            return f"no such command: {' '.join(words)}"
        command, info, rest = command.commands[words[0]], words[0], words[1:]
