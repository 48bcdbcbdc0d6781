"""Runs the stack's children: start in order, restart what died, drain in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.children import Child, ChildFailedError
from paceline.cli.console import EXIT_DONE, EXIT_START_FAILED
from paceline.cli.plan import DRAIN_ORDER, ChildSpec
from paceline.wire.process import write_state

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 10.0
BACKOFF_RESET_S = 30.0
"""A child that lived this long starts over with the first delay."""

Session = Callable[[dict[str, Any]], Awaitable[int | None]]


class Supervisor:
    """The stack while it runs. ``stopping`` drains it, ``aborting`` kills it.

    Args:
        say: progress for people.
        forward: the children's log lines.
        prepare: runs before the first child is started.
        state_dir: where state.json is kept up to date.
        restart: whether a child that died is started again.
        redis_url: for state.json.
        sleep: waits between restarts; tests pass their own.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        state_dir: Path,
        *,
        say: Callable[[str], None],
        forward: Callable[[str], None],
        prepare: Callable[[], Awaitable[None]] | None = None,
        restart: bool = True,
        redis_url: str = "",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.stopping = asyncio.Event()
        self.aborting = asyncio.Event()
        self.children = [Child(spec, forward) for spec in specs]
        self._state_dir = state_dir
        self._say = say
        self._prepare = prepare
        self._restart = restart
        self._redis_url = redis_url
        self._sleep = sleep

    def on_signal(self) -> None:
        (self.aborting if self.stopping.is_set() else self.stopping).set()

    async def run(self, session: Session) -> int:
        """Runs until told to stop.

        Args:
            session: called once with the ready event; an exit code ends the stack, None keeps it running.

        Returns:
            0 after a drain, 3 if a child could not start, else the session's code.
        """
        keepers: list[asyncio.Task[None]] = []
        try:
            if not await self._unless_stopped(self._start()):
                return EXIT_DONE
            keepers = [asyncio.create_task(self._keep(child)) for child in self.children]
            return await self._serve(session, keepers)
        except ChildFailedError as failure:
            self._say("\n".join([f"paceline: {failure}", *failure.tail]))
            return EXIT_START_FAILED
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop()

    def event(self) -> dict[str, Any]:
        """The ready event of the stack as it is now; a child about to be restarted keeps its entry."""
        gateway = next((c.ready for c in self.children if c.spec.role == "gateway"), {})
        return {
            "event": "ready",
            "http": gateway.get("http", ""),
            "grpc": gateway.get("grpc", ""),
            "admin": gateway.get("admin", ""),
            "redis": self._redis_url,
            "processes": [child.state() for child in self.children if child.alive or self._restart],
        }

    async def _serve(self, session: Session, keepers: Sequence[asyncio.Task[None]]) -> int:
        write_state(self._state_dir, self.event())
        work: asyncio.Future[int | None] = asyncio.ensure_future(session(self.event()))
        stop = asyncio.create_task(self.stopping.wait())
        pending: set[asyncio.Future[Any]] = {work, stop, *keepers}
        try:
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    return EXIT_DONE
                for task in done:
                    code = task.result()
                    if task is work and code is not None:
                        return int(code)
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def _start(self) -> None:
        """Starts every child once those it comes after are ready; the first failure cancels the rest."""
        if self._prepare is not None:
            await self._prepare()
        started = {child: asyncio.Event() for child in self.children}

        async def launch(child: Child) -> None:
            for other in self.children:
                if other.spec.role in child.spec.after:
                    await started[other].wait()
            await child.start()
            started[child].set()
            seconds = asyncio.get_running_loop().time() - child.started_at
            self._say(f"paceline: {child.spec.name} ready after {seconds:.1f} s")

        tasks = [asyncio.create_task(launch(child)) for child in self.children]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        delay_s = BACKOFF_FIRST_S
        loop = asyncio.get_running_loop()
        while True:
            code = await child.wait()
            self._say(f"paceline: {child.spec.name} ended with exit code {code}")
            if not self._restart:
                write_state(self._state_dir, self.event())
                return
            if loop.time() - child.started_at >= BACKOFF_RESET_S:
                delay_s = BACKOFF_FIRST_S
            await self._sleep(delay_s)
            delay_s = min(2 * delay_s, BACKOFF_MAX_S)
            try:
                await child.start()
            except ChildFailedError as failure:
                self._say(f"paceline: {failure}")
                continue
            self._say(f"paceline: {child.spec.name} restarted")
            write_state(self._state_dir, self.event())

    async def _stop(self) -> None:
        for role in DRAIN_ORDER:
            group = [child for child in self.children if child.spec.role == role and child.alive]
            for child in group:
                child.send(signal.SIGTERM)
            if group and not self.aborting.is_set():
                ended = asyncio.gather(*(child.wait() for child in group))
                await self._unless_aborted(ended, max(child.spec.grace_s for child in group))
            for child in group:
                child.send(signal.SIGKILL)
        await asyncio.gather(*(child.wait() for child in self.children))

    async def _unless_aborted(self, work: asyncio.Future[Any], timeout_s: float) -> None:
        abort = asyncio.create_task(self.aborting.wait())
        try:
            await asyncio.wait({work, abort}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, abort):
                task.cancel()
            await asyncio.gather(work, abort, return_exceptions=True)

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """True once ``work`` is done, False if the stack was told to stop before."""
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            task.result()
            return True
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
