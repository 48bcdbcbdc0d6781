"""`paceline serve ROLE`: one process of the stack."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import (
    EXIT_START_FAILED,
    EXIT_USAGE,
    Assignments,
    ConfigFile,
    RunDir,
    fail,
    servable_or_exit,
    settings_or_exit,
)

if TYPE_CHECKING:
    from paceline.wire.settings import Settings


class Role(StrEnum):
    GATEWAY = "gateway"
    VERIFIER = "verifier"
    DRAFTER = "drafter"
    POLICY = "policy"


def serve(
    role: Annotated[Role, typer.Argument(help="Which process.")],
    config: ConfigFile = None,
    assignments: Assignments = None,
    port: Annotated[int | None, typer.Option("--port", metavar="N", help="Port it listens on.")] = None,
    run_dir: RunDir = None,
    worker_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Entry of verifiers or drafters.")
    ] = None,
) -> None:
    """Run one process until SIGINT or SIGTERM; a second signal stops it at once."""
    from paceline.wire.process import run_process

    settings = settings_or_exit(config, assignments)
    entry_id = entry_of(role, worker_id, settings)
    if port is not None:
        settings = settings_or_exit(config, assignments, port_flag(role, entry_id, port))
    servable_or_exit(settings)
    try:
        main: Any = import_module(f"paceline.{role.value}.main")
    except ModuleNotFoundError as error:
        fail(f"{error}; install paceline[{role.value}]", EXIT_START_FAILED)
    raise typer.Exit(
        run_process(main.serve, settings=settings, role=role.value, worker_id=entry_id, run_dir=run_dir)
    )


def entry_of(role: Role, worker_id: str | None, settings: Settings) -> str:
    """The id to serve under: of a list entry for verifiers and drafters; exits with 2 if there is none."""
    if role not in (Role.VERIFIER, Role.DRAFTER):
        return worker_id or role.value
    entries = settings.verifiers if role is Role.VERIFIER else settings.drafters
    ids = [entry.id for entry in entries]
    if not ids:
        fail(f"--id: there are no {role.value}s in the configuration", EXIT_USAGE)
    if worker_id is None and len(ids) > 1:
        fail(f"--id: want one of {', '.join(ids)}", EXIT_USAGE)
    if worker_id is not None and worker_id not in ids:
        fail(f"--id: no {role.value} {worker_id!r}; want one of {', '.join(ids)}", EXIT_USAGE)
    return worker_id or ids[0]


def port_flag(role: Role, entry_id: str, port: int) -> dict[str, int]:
    if role in (Role.GATEWAY, Role.POLICY):
        return {f"{role.value}.port": port}
    return {f"{role.value}s.{entry_id}.port": port}
