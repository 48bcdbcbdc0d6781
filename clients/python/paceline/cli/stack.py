"""The whole stack from settings: run folder, resolved configuration, models, embedded Redis, supervisor."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.cli.children import ChildFailedError
from paceline.cli.config import masked
from paceline.cli.console import EXIT_START_FAILED, say
from paceline.cli.plan import (
    ChildSpec,
    free_ports,
    is_free,
    needed_models,
    paceline_command,
    processes,
    resolve,
)
from paceline.cli.supervisor import Session, Supervisor
from paceline.core.errors import ConfigError
from paceline.wire.models import locate_path
from paceline.wire.parent import die_with
from paceline.wire.process import StartupError
from paceline.wire.settings import Settings


class RunDirTakenError(Exception):
    """Another stack runs in this folder."""


def run_stack(
    settings: Settings, *, run_dir: Path | None, session: Session, forward: Callable[[str], None]
) -> int:
    """Runs the stack until SIGINT or SIGTERM, or until ``session`` returns an exit code.

    Args:
        run_dir: where ``state.json`` is written and kept; None keeps nothing.
        session: called once with the ready event.
        forward: gets the children's log lines.

    Returns:
        The command's exit code.
    """
    try:
        with state_folder(run_dir) as states, tempfile.TemporaryDirectory(prefix="paceline-") as private:
            return asyncio.run(_run(settings, states or Path(private), Path(private), session, forward))
    except (RunDirTakenError, StartupError, OSError) as error:
        say(f"paceline: {error}")
        return EXIT_START_FAILED


@contextmanager
def state_folder(run_dir: Path | None) -> Iterator[Path | None]:
    """``run_dir``, made if need be and held by one stack at a time.

    Only state.json is ever kept in it: everything else, sockets above all, lies in a private folder, whose
    path is short enough for a socket's name.
    """
    if run_dir is None:
        yield None
        return
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = run_dir / "lock"
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirTakenError(f"--run-dir {run_dir}: another stack runs there") from None
        # Whoever waits for it must not read the last run's.
        (run_dir / "state.json").unlink(missing_ok=True)
        try:
            yield run_dir
        finally:
            lock.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """The resolved settings may hold the queue's password."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


async def _run(
    settings: Settings, states: Path, folder: Path, session: Session, forward: Callable[[str], None]
) -> int:
    redis, redis_url = (None, "") if settings.queue.url else _embedded_redis(folder)
    ports = iter(free_ports(2 * (len(settings.verifiers) + len(settings.drafters) + 1) + 3))
    resolved = resolve(
        settings, lambda wanted: wanted if wanted and is_free(wanted) else next(ports), redis_url
    )
    gateway = resolved.gateway
    for port in (gateway.port, gateway.grpc_port, gateway.admin_port):
        # Told before the model is loaded; the gateway itself would find out after.
        if port and not is_free(port, gateway.host):
            say(f"paceline: port {port} of {gateway.host} is in use")
            return EXIT_START_FAILED
    config = folder / "config.json"  # JSON is YAML
    write_private(config, json.dumps(resolved.model_dump(mode="json")))
    supervisor = Supervisor(
        processes(resolved, config, folder, os.environ, redis),
        states,
        say=say,
        forward=forward,
        prepare=lambda: pull_missing(needed_models(resolved)),
        restart=resolved.supervise.restart,
        redis_url=masked(resolved.queue.url),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.on_signal)
    return await supervisor.run(session)


def _embedded_redis(folder: Path) -> tuple[ChildSpec, str]:
    from paceline.gateway.queue.embedded import EmbeddedRedis

    redis = EmbeddedRedis(folder)
    return ChildSpec("redis", "redis", tuple(redis.command()), socket=redis.socket), redis.url


async def pull_missing(names: list[str]) -> None:
    """Fetches the models that are not on disk, each in a child process.

    Raises:
        ChildFailedError: one could not be fetched; why is on stderr.
    """
    for name in names:
        try:
            locate_path(name)
        except ConfigError:
            say(f"paceline: fetching model {name}")
            await _pull(name)


async def _pull(name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *paceline_command("models", "pull", name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    )
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise ChildFailedError(f"model {name} could not be fetched (exit code {code})")
