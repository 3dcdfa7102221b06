"""The commands of `sam` and their options.

Owns the command line and the exit code. Must never hold what a command does, only call it.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sam import __version__
from sam.cli import commands, delegate, output
from sam.cli.errors import MEANINGS, CliError, Exit
from sam.cli.hint_commands import hint_app

_CODES = "\n\n".join(f"`{code.value}` {text}" for code, text in MEANINGS.items())
_EPILOG = (
    f"**Exit codes**\n\n{_CODES}\n\n`sam patch`, `doctor`, `bench` and `sim` have the codes of"
    " what they run; each `--help` lists them."
)
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Raised for a wrong command line only where typer does not print and exit by itself."""
_PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

app = typer.Typer(
    name="sam",
    help="See and steer the agent sessions in an SGLang server's KV cache.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
patch_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
_PATCH_HELP = {
    "apply": "Prove the installed SGLang, apply the patches, prove the result.",
    "status": "Say what is there.",
    "check": "Prove byte for byte that the patches are applied, or that they would apply.",
    "revert": "Put every original file back, byte for byte.",
}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sam {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """See and steer the agent sessions in an SGLang server's KV cache."""


app.command("sessions")(commands.sessions)
app.command("session")(commands.session)
app.command("tree")(commands.tree)
app.command("top")(commands.top)
app.add_typer(hint_app, name="hint", help="Send a hint and wait for its outcome.")


@app.command("doctor", context_settings=_PASS_ON, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Check that this environment can serve with sam (`--json`)."""
    delegate.become("-m", "sam.doctor", *context.args)


@app.command("bench", context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure what sam costs and brings: `sam bench NAME …`."""
    delegate.need("sglang", "it measures SGLang itself; README.md says how to install it")
    delegate.become("-m", "sam.bench", *context.args)


@app.command("sim", context_settings=_PASS_ON, add_help_option=False)
def sim(context: typer.Context) -> None:
    """Replay a trace through sam's decisions, without a server."""
    delegate.need("tqdm", "pip install 'agent-sam[sim]'")
    delegate.become("-m", "sam.sim", *context.args)


def _add_patch_command(name: str) -> None:
    @patch_app.command(name, help=_PATCH_HELP[name], context_settings=_PASS_ON)
    def run(context: typer.Context) -> None:
        raise typer.Exit(delegate.patch(name, context.args))


for _name in _PATCH_HELP:
    _add_patch_command(_name)
app.add_typer(patch_app, name="patch", help="Patch the installed SGLang; see `sam patch apply -h`.")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    as_json = "--json" in arguments
    try:
        code = app(args=arguments, prog_name="sam", standalone_mode=not as_json)
    except CliError as error:
        return _fail(error, as_json=as_json)
    except _UsageError as error:
        wrong = CliError(Exit.USAGE, error.format_message(), "see --help")  # type: ignore[attr-defined]
        return _fail(wrong, as_json=as_json)
    except SystemExit as end:
        return int(end.code or 0)
    except BrokenPipeError:
        sys.stderr.close()
        return int(Exit.FINDING)
    return int(code or Exit.OK)


def _fail(error: CliError, *, as_json: bool) -> int:
    if as_json:
        output.print_json(
            {"exit_code": int(error.code), "error": error.message, "remedy": error.remedy}
        )
    print(f"sam: {error.message}", file=sys.stderr)
    if error.remedy:
        print(f"  -> {error.remedy}", file=sys.stderr)
    return int(error.code)
