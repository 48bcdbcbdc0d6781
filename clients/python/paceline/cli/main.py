"""The command line's entry point. Commands import what they need when they run, so that `--version` is fast
and an installation with one role's extra needs no other role's packages.
"""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import bench, chat, config, demo, doctor, fleet, health, models, serve, up

app = typer.Typer(
    name="paceline",
    help="Speculative decoding split across machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: brackets in it are brackets.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding split across machines."""


app.command("up")(up.up)
app.command("serve")(serve.serve)
app.command("health")(health.health)
app.command("doctor")(doctor.doctor)
app.add_typer(config.app, name="config")
app.command("chat")(chat.chat)
app.add_typer(models.app, name="models")
app.command("bench")(bench.bench)
app.command("explain")(fleet.explain)
app.command("top")(fleet.top)
app.command("demo", hidden=True)(demo.demo)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
