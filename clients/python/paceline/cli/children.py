"""One child process: spawn, ready line, last stderr lines, end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from paceline.cli.plan import ChildSpec
from paceline.wire.parent import die_with

TAIL_LINES = 20
_MAX_LINE_BYTES = 1 << 20
_SOCKET_POLL_S = 0.02


class ChildFailedError(Exception):
    """A child ended before it was ready; ``tail`` holds its last stderr lines."""

    def __init__(self, message: str, tail: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.tail = tuple(tail)


class _Output(asyncio.SubprocessProtocol):
    """Cuts a child's output into lines. ``exited`` comes first, ``closed`` once nothing holds its pipes."""

    def __init__(self, on_line: Callable[[int, str], None]) -> None:
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self._on_line = on_line
        self._partial = {1: b"", 2: b""}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._partial[fd] + data).split(b"\n")
        self._partial[fd] = rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._on_line(fd, line.decode("utf-8", "replace"))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if rest := self._partial.get(fd):
            self._on_line(fd, rest.decode("utf-8", "replace"))

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class Child:
    """A process and what it said. `start` may be called again once it has ended.

    Args:
        forward: gets every stderr line, and stdout lines other than the ready line.
    """

    def __init__(self, spec: ChildSpec, forward: Callable[[str], None]) -> None:
        self.spec = spec
        self.ready: dict[str, Any] = {}
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.started_at = 0.0
        self._forward = forward
        self._transport: asyncio.SubprocessTransport | None = None
        self._output = _Output(self._on_line)
        self._announced = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._output.exited.is_set()

    async def start(self) -> None:
        """Returns when the child is ready.

        Raises:
            ChildFailedError: it ended first.
        """
        self._announced.clear()
        self.tail.clear()
        loop = asyncio.get_running_loop()
        self.started_at = loop.time()
        try:
            self._transport, self._output = await loop.subprocess_exec(
                lambda: _Output(self._on_line),
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**(self.spec.environment or os.environ), "PYTHONUNBUFFERED": "1"},
                # A session of its own: Ctrl-C reaches the supervisor alone, which drains in order.
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        except OSError as error:
            raise ChildFailedError(f"{self.spec.name} cannot be started: {error}") from None
        ready = asyncio.create_task(self._connectable() if self.spec.socket else self._announced_ready())
        ended = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                code = ended.result()
                raise ChildFailedError(f"{self.spec.name} failed to start (exit code {code})", self.tail)
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def wait(self) -> int:
        """The exit code, once the last line of output was read and nothing it started is left."""
        if self._transport is None:
            return 0
        output, transport = self._output, self._transport
        await output.exited.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        await output.closed.wait()
        code = transport.get_returncode()
        transport.close()
        return 0 if code is None else code

    def send(self, number: signal.Signals) -> None:
        if self._transport is not None and self.alive:
            self._transport.send_signal(number)

    def state(self) -> dict[str, Any]:
        """Its entry under ``processes`` in state.json."""
        own = (self.ready.get("processes") or [{}])[0]
        return {
            "role": self.spec.role,
            "id": self.spec.id,
            "pid": 0 if self._transport is None else self._transport.get_pid(),
            "grpc": own.get("grpc", ""),
            "admin": own.get("admin", ""),
        }

    def _on_line(self, fd: int, line: str) -> None:
        if fd == 2:
            self.tail.append(line)
        elif not self._announced.is_set() and (event := _ready_event(line)):
            self.ready = event
            self._announced.set()
            return
        self._forward(line)

    async def _announced_ready(self) -> None:
        await self._announced.wait()

    async def _connectable(self) -> None:
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(str(self.spec.socket))
            except OSError:
                await asyncio.sleep(_SOCKET_POLL_S)
                continue
            writer.close()
            await writer.wait_closed()
            return


def _ready_event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.get("event") == "ready" else None
