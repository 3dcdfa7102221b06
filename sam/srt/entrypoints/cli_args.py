"""`--sam-*` options of the server's command line: one for each field of SamConfig.

Owns their names and their way into the environment, which every process of the server reads.
Must never change what upstream's own options mean, nor take a value that SamConfig refuses.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import msgspec

from sam.config import ENV_PREFIX, HELP, ConfigError, SamConfig, load_config

_PREFIX = "sam_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Their default is what the environment says, else SamConfig's."""
    group = parser.add_argument_group("sam", "Only with --radix-cache-backend sam.")
    for field in msgspec.structs.fields(SamConfig):
        variable = ENV_PREFIX + field.name.upper()
        switch = field.type is bool
        help_text = HELP.get(field.name, "see docs/operating.md")
        group.add_argument(
            f"--sam-{field.name.replace('_', '-')}",
            dest=_PREFIX + field.name,
            default=None,
            type=_checked(variable),
            help=f"{help_text} (default {field.default}; {variable})",
            **({"nargs": "?", "const": "true"} if switch else {"metavar": "VALUE"}),
        )


def export(args: argparse.Namespace, env: dict[str, str] | None = None) -> None:
    """Put the given options into the environment; they win over what was there.

    Raises ConfigError where they could not take effect.
    """
    env = os.environ if env is None else env
    given = {
        name: value
        for name, value in vars(args).items()
        if name.startswith(_PREFIX) and value is not None
    }
    if given and args.radix_cache_backend != "sam":
        option = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(f"{option} needs --radix-cache-backend sam")
    for name, value in given.items():
        env[ENV_PREFIX + name.removeprefix(_PREFIX).upper()] = value


def install_options() -> None:
    """Hook the options into upstream's parser; call while plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{server_args}.add_cli_args", _after_add, HookType.AFTER)
    HookRegistry.register(f"{server_args}.from_cli_args", _before_read, HookType.BEFORE)


def _after_add(result: Any, parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)


def _before_read(cls: type, args: argparse.Namespace) -> None:
    export(args)


def _checked(variable: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        try:
            load_config({variable: value})
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return check
