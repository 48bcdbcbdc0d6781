"""Life of one process: event loop, signals, the ready line, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from paceline.core.errors import ConfigError, PacelineError
from paceline.wire.settings import Settings
from paceline.wire.telemetry import configure_logging, get_logger

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_START_FAILED = 0, 1, 2, 3

_log = get_logger(__name__)


class StartupError(Exception):
    """The process cannot start; the message says why."""


@dataclass
class ProcessContext:
    """What a role's ``serve`` gets. ``stopping`` asks it to drain, ``aborting`` to stop at once."""

    settings: Settings
    worker_id: str
    role: str
    run_dir: Path
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    aborting: asyncio.Event = field(default_factory=asyncio.Event)

    def ready(self, *, http: str = "", grpc: str = "", admin: str = "", redis: str = "") -> None:
        """Prints the ready line on stdout and writes it to ``state.json``."""
        process = {
            "role": self.role,
            "id": self.worker_id,
            "pid": os.getpid(),
            "grpc": grpc,
            "admin": admin,
        }
        event: dict[str, object] = {
            "event": "ready",
            "http": http,
            "grpc": grpc,
            "admin": admin,
            "redis": redis,
            "processes": [process],
        }
        write_state(self.run_dir, event)
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    async def drained(self, finished: Awaitable[object], grace_s: float) -> bool:
        """Waits for ``finished`` until the grace is over or a second signal came; True if it finished."""
        work = asyncio.ensure_future(finished)
        abort = asyncio.ensure_future(self.aborting.wait())
        try:
            await asyncio.wait({work, abort}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            return work.done()
        finally:
            for task in (work, abort):
                task.cancel()
            await asyncio.gather(work, abort, return_exceptions=True)


ServeFunction = Callable[[ProcessContext], Awaitable[None]]


def write_state(run_dir: Path, event: dict[str, object]) -> None:
    """Replaces ``state.json`` in one step, so that a reader never sees half a file."""
    temporary = run_dir / ".state.json.new"
    temporary.write_text(json.dumps(event) + "\n", encoding="utf-8")
    temporary.replace(run_dir / "state.json")


def run_process(
    serve: ServeFunction, *, settings: Settings, role: str, worker_id: str, run_dir: Path | None
) -> int:
    """Runs one role until it is told to stop.

    Args:
        run_dir: kept working folder; None makes a private one that is removed at the end.

    Returns:
        0 after a clean drain, 1 if it failed while running, 3 if it could not start.
    """
    configure_logging(role, worker_id)
    own = Path(tempfile.mkdtemp(prefix=f"paceline-{role}-")) if run_dir is None else None
    folder = own or run_dir
    if folder is None:  # for the type checker: one of the two is set
        raise StartupError("no run folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return uvloop.run(_main(serve, settings, role, worker_id, folder))
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


async def _main(serve: ServeFunction, settings: Settings, role: str, worker_id: str, run_dir: Path) -> int:
    context = ProcessContext(settings, worker_id, role, run_dir)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (context.aborting if context.stopping.is_set() else context.stopping).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await serve(context)
    except (StartupError, ConfigError) as error:
        _log.error("start_failed", reason=str(error))
        return EXIT_START_FAILED
    except PacelineError as error:
        _log.error("failed", reason=error.message, kind=error.kind.value)
        return EXIT_FAILED
    except Exception:  # noqa: BLE001 - the process boundary: logged, then the exit code tells
        _log.exception("failed")
        return EXIT_FAILED
    return EXIT_DONE
