"""What every command shares: output, failures with the documented exit codes, loading of settings.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 start-up failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from paceline.wire.settings import Settings

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_START_FAILED = 0, 1, 2, 3

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="F", help="YAML file; see docs/configuration.md.")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=v", help="Set one key; list entries by id.")
]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="D", help="Kept working folder; state.json lies in it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def say(message: str) -> None:
    """One line for people, on stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    say(f"paceline: {message}")
    raise typer.Exit(code)


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def settings_or_exit(
    config: Path | None, assignments: list[str] | None, flags: Mapping[str, Any] | None = None
) -> Settings:
    """The settings in force; exits with 2 and the key's name if they are wrong."""
    from paceline.core.errors import ConfigError
    from paceline.wire.config import load_settings

    try:
        return load_settings(config, assignments or (), flags or {})
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)


def servable_or_exit(settings: Settings) -> Settings:
    """The same settings if they can be served; says which keys have no effect, exits with 2 otherwise."""
    from paceline.core.errors import ConfigError
    from paceline.wire.config import check_servable

    try:
        unused = check_servable(settings)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    for key in unused:
        say(f"{key} has no effect in this version")
    return settings
