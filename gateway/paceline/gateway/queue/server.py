"""The connection to the server: bounded times, one kind of error, the checks at start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio
from redis.exceptions import AuthenticationError, RedisError

from paceline.core.errors import ConfigError, ErrorKind, PacelineError
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 2.0
"""No command, retries and the wait for a free connection included, takes longer."""
RETRY_AFTER_S = 1.0
_MAX_CONNECTIONS = 64
_MIN_VERSION = (7, 0)


def connect(url: str) -> redis.asyncio.Redis:
    """A client for ``redis://``, ``rediss://`` or ``unix://``; nothing is sent yet.

    At most 64 connections: callers of a server that hangs wait for one, briefly, instead of piling up.

    Raises:
        ConfigError: not such a URL.
    """
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=COMMAND_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=COMMAND_TIMEOUT_S,
        )
    except ValueError as error:
        raise ConfigError(f"queue.url: {error}") from error
    return redis.asyncio.Redis.from_pool(pool)


@asynccontextmanager
async def server_errors(timeout_s: float = COMMAND_TIMEOUT_S) -> AsyncIterator[None]:
    """Bounds the commands inside it.

    Raises:
        PacelineError: UNAVAILABLE for a server that is gone, hangs, is out of memory or is a replica.
    """
    task = asyncio.current_task()
    cancellations = task.cancelling() if task else 0
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise _unavailable(f"no answer within {timeout_s:g} s") from error
    except (RedisError, OSError) as error:
        # Its text may name the socket's path, which is no caller's business; the log has it.
        _log.warning("queue_error", reason=str(error), kind=type(error).__name__)
        raise _unavailable(type(error).__name__) from error
    if task and task.cancelling() > cancellations:
        raise asyncio.CancelledError  # one that comes while a connection is made can get lost there


def _unavailable(reason: str) -> PacelineError:
    return PacelineError(
        ErrorKind.UNAVAILABLE, f"the admission queue is unavailable: {reason}", retry_after_s=RETRY_AFTER_S
    )


async def check(client: redis.asyncio.Redis) -> None:
    """Whether this server can hold the queue.

    Raises:
        ConfigError: too old, may evict keys, a replica, or it refuses the credentials.
        PacelineError: UNAVAILABLE, if it can't be asked.
    """
    async with server_errors():
        try:
            info = await client.info()
        except AuthenticationError as error:
            raise ConfigError(f"queue.url: {error}") from error
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        raise ConfigError(f"queue.url: the server speaks Redis {version}; 7.0 or later is needed")
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise ConfigError(f"queue.url: the server's maxmemory-policy is {policy}; it must be noeviction")
    if info.get("role") != "master":
        raise ConfigError(f"queue.url: the server is a {info.get('role')}; the primary is needed")
