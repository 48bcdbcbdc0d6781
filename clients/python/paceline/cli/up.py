"""`paceline up`: the stack as child processes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli.console import (
    Assignments,
    ConfigFile,
    RunDir,
    print_json,
    say,
    servable_or_exit,
    settings_or_exit,
)


def up(
    config: ConfigFile = None,
    assignments: Assignments = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="HTTP port; 0 is a free one.")
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Run the stack until SIGINT or SIGTERM, which drain it; a second signal stops it at once."""
    flags = {} if port is None else {"gateway.port": port}
    settings = servable_or_exit(settings_or_exit(config, assignments, flags))
    from paceline.cli.stack import run_stack

    async def announce(ready: dict[str, Any]) -> None:
        print_json(ready)

    raise typer.Exit(run_stack(settings, run_dir=run_dir, session=announce, forward=say))
