"""Real servers: the embedded one, and Debian's where it is installed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis

from paceline.gateway.queue import AdmissionQueue, EmbeddedRedis


@pytest.fixture(params=["embedded", "redis-server"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    server = EmbeddedRedis(tmp_path)
    if request.param == "embedded":
        async with server:
            yield server.url
        return
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed")
    process = await asyncio.create_subprocess_exec(
        binary, *server.command()[1:], stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await server.wait_ready()
        yield server.url
    finally:
        process.terminate()
        await process.wait()
        server.clean()


@pytest.fixture
async def client(url: str) -> AsyncIterator[redis.Redis]:
    client = redis.from_url(url)
    yield client
    await client.aclose()


@pytest.fixture
async def queue(client: redis.Redis) -> AdmissionQueue:
    queue = AdmissionQueue(client, model="m", owner="g1", max_requests=4, max_tokens=1000, lease_s=10)
    await queue.check_server()
    await queue.heartbeat()
    return queue
