"""`paceline config show`: the settings in force after every layer."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import typer

from paceline.cli.console import AsJson, Assignments, ConfigFile, print_json, settings_or_exit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The configuration in force.")


@app.callback()
def group() -> None:
    """The configuration in force."""


@app.command("show")
def show(config: ConfigFile = None, assignments: Assignments = None, json: AsJson = False) -> None:
    """Print the resolved settings; passwords are masked."""
    import yaml

    tree: dict[str, Any] = settings_or_exit(config, assignments).model_dump(mode="json")
    tree["queue"]["url"] = masked(tree["queue"]["url"])
    if json:
        print_json(tree)
    else:
        typer.echo(yaml.safe_dump(tree, sort_keys=False), nl=False)


def masked(url: str) -> str:
    """``url`` with its password, if it has one, as ``***``."""
    password = urlsplit(url).password
    if not password:
        return url
    credentials, at, rest = url.rpartition("@")
    return credentials[: -len(password)] + "***" + at + rest
