"""The embedded server's life: private, durable, tied to its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis.asyncio as redis

from paceline.gateway.queue import EmbeddedRedis
from paceline.wire.process import StartupError


async def test_socket_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    async with server:
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
        client = redis.from_url(server.url)
        assert (await client.config_get("port")) == {"port": "0"}
        await client.aclose()
    assert not [p for p in tmp_path.rglob("*") if p.is_socket() or p.suffix == ".lock"]


async def test_a_deep_run_folder_still_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    server = EmbeddedRedis(deep)
    async with server:
        assert len(str(server.socket)) < 100
    assert not server.socket.parent.exists()


async def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path):
        with pytest.raises(StartupError, match="in use"):
            await EmbeddedRedis(tmp_path).start()


async def test_data_survive_a_clean_restart(tmp_path: Path) -> None:
    for expected in (None, b"kept"):
        async with EmbeddedRedis(tmp_path) as server:
            client = redis.from_url(server.url)
            assert await client.get("key") == expected
            await client.set("key", "kept")
            await client.aclose()


PARENT = """
import asyncio, sys
from pathlib import Path
from paceline.gateway.queue import EmbeddedRedis
async def main():
    server = EmbeddedRedis(Path(sys.argv[1]))
    await server.start()
    print(server._process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_it_dies_with_a_killed_parent(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        handle = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    # The pidfd becomes readable when the process has ended.
    import select

    ready, _, _ = select.select([handle], [], [], 10)
    os.close(handle)
    assert ready, "the server outlived its parent"
