"""The supervisor over small fake children: start, restart, drain, start-up failure, second signal."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.console import EXIT_DONE, EXIT_START_FAILED
from paceline.cli.plan import ChildSpec
from paceline.cli.supervisor import BACKOFF_FIRST_S, BACKOFF_MAX_S, Supervisor

READY = """
import json, os, signal, sys
def ready():
    own = {"role": "x", "id": "x", "pid": os.getpid(), "grpc": "127.0.0.1:" + sys.argv[1], "admin": ""}
    print(json.dumps({"event": "ready", "http": "http://x", "grpc": "", "admin": "", "redis": "",
                      "processes": [own]}), flush=True)
"""
# Tells the supervisor's log when it drains, then goes.
GOOD = (
    READY
    + """
def stop(*_):
    print(sys.argv[2], "drained", file=sys.stderr, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
ready()
while True:
    signal.pause()
"""
)
STUBBORN = (
    READY
    + """
signal.signal(signal.SIGTERM, lambda *_: print("ignoring", file=sys.stderr, flush=True))
ready()
while True:
    signal.pause()
"""
)
BROKEN = """
import sys
for i in range(30):
    print("line", i, file=sys.stderr)
sys.exit(7)
"""
SILENT = "import signal\nwhile True: signal.pause()"
# Dies at once on every start but the first.
ONCE = (
    READY
    + """
import pathlib
mark = pathlib.Path(sys.argv[3])
if mark.exists():
    sys.exit(1)
mark.touch()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
ready()
while True:
    signal.pause()
"""
)


class Log:
    """Lines, and events that come when a line does."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        task = asyncio.get_running_loop().create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def has(self, part: str, times: int = 1) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: sum(part in line for line in self.lines) >= times)


class Stack:
    """A supervisor that runs in a task until the test ends."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.log = Log()
        self.ready: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.delays: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.supervisor: Supervisor
        self.task: asyncio.Task[int]

    def spec(self, role: str, script: str, **options: Any) -> ChildSpec:
        number = str(len(role))
        mark = str(self.state_dir / f"{role}.mark")
        return ChildSpec(role, role, (sys.executable, "-S", "-c", script, number, role, mark), **options)

    def start(self, *specs: ChildSpec, session_code: int | None = None, **options: Any) -> None:
        async def session(event: dict[str, Any]) -> int | None:
            self.ready.put_nowait(event)
            return session_code

        async def sleep(delay_s: float) -> None:
            self.delays.append(delay_s)
            await self.gate.wait()

        self.supervisor = Supervisor(
            specs,
            self.state_dir,
            say=self.log,
            forward=self.log,
            sleep=sleep,
            redis_url="unix:///s",
            **options,
        )
        self.task = asyncio.create_task(self.supervisor.run(session))

    def state(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.state_dir / "state.json").read_text())
        return loaded


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    running = Stack(tmp_path)
    yield running
    running.supervisor.stopping.set()
    running.supervisor.aborting.set()
    await asyncio.gather(running.task, return_exceptions=True)
    assert not any(child.alive for child in running.supervisor.children)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_ready_once_all_are_and_drained_in_order(stack: Stack) -> None:
    roles = ["redis", "policy", "drafter", "verifier", "gateway"]
    stack.start(*(stack.spec(role, GOOD, after=("redis",) if role == "gateway" else ()) for role in roles))
    event = await stack.ready.get()
    assert event["event"] == "ready"
    assert (event["http"], event["redis"]) == ("http://x", "unix:///s")
    assert [p["role"] for p in event["processes"]] == roles
    assert [p["grpc"] for p in event["processes"]] == [f"127.0.0.1:{len(role)}" for role in roles]
    assert stack.state() == event
    ready = [line.split()[1] for line in stack.log.lines if " ready after " in line]
    assert ready.index("redis") < ready.index("gateway")

    stack.supervisor.on_signal()
    assert await stack.task == EXIT_DONE
    drained = [line.split()[0] for line in stack.log.lines if line.endswith("drained")]
    assert drained == ["gateway", "verifier", "drafter", "policy", "redis"]
    assert not any(exists(p["pid"]) for p in event["processes"])


async def test_children_lead_sessions_of_their_own(stack: Stack) -> None:
    stack.start(stack.spec("gateway", GOOD))
    pid = (await stack.ready.get())["processes"][0]["pid"]
    assert os.getsid(pid) == pid


async def test_the_first_failure_ends_the_start(stack: Stack) -> None:
    stack.start(stack.spec("policy", GOOD), stack.spec("drafter", SILENT), stack.spec("verifier", BROKEN))
    assert await stack.task == EXIT_START_FAILED
    (message,) = [line for line in stack.log.lines if "failed to start" in line]
    assert message.splitlines()[0] == "paceline: verifier failed to start (exit code 7)"
    assert message.splitlines()[1:] == [f"line {i}" for i in range(10, 30)]
    assert stack.ready.empty()


async def test_a_command_that_does_not_exist_fails_the_start(stack: Stack) -> None:
    stack.start(ChildSpec("policy", "policy", ("/no/such/program",)))
    assert await stack.task == EXIT_START_FAILED
    assert any("policy cannot be started" in line for line in stack.log.lines)


async def test_a_failed_preparation_fails_the_start(stack: Stack) -> None:
    async def prepare() -> None:
        from paceline.cli.children import ChildFailedError

        raise ChildFailedError("model m could not be fetched")

    stack.start(stack.spec("policy", GOOD), prepare=prepare)
    assert await stack.task == EXIT_START_FAILED
    assert not any("ready after" in line for line in stack.log.lines)


async def test_a_dead_child_is_restarted_and_state_follows(stack: Stack) -> None:
    stack.start(stack.spec("drafter", GOOD), stack.spec("gateway", GOOD))
    before = (await stack.ready.get())["processes"]
    stack.gate.clear()
    os.kill(before[0]["pid"], signal.SIGKILL)
    await stack.log.has("drafter ended with exit code -9")
    assert stack.state()["processes"] == before
    stack.gate.set()
    await stack.log.has("drafter restarted")
    after = stack.state()["processes"]
    assert [p["role"] for p in after] == ["drafter", "gateway"]
    assert after[0]["pid"] != before[0]["pid"]
    assert after[0]["grpc"] == before[0]["grpc"]
    assert after[1] == before[1]
    assert stack.delays == [BACKOFF_FIRST_S]


async def test_back_off_doubles_up_to_its_limit(stack: Stack) -> None:
    stack.start(stack.spec("drafter", ONCE), stack.spec("gateway", GOOD))
    event = await stack.ready.get()
    os.kill(event["processes"][0]["pid"], signal.SIGKILL)
    await stack.log.has("drafter failed to start", times=7)
    expected = [min(BACKOFF_FIRST_S * 2**i, BACKOFF_MAX_S) for i in range(7)]
    assert stack.delays[:7] == expected
    assert expected[-1] == BACKOFF_MAX_S


async def test_without_restart_the_others_go_on(stack: Stack) -> None:
    stack.start(stack.spec("drafter", GOOD), stack.spec("gateway", GOOD), restart=False)
    event = await stack.ready.get()
    os.kill(event["processes"][0]["pid"], signal.SIGKILL)
    await stack.log.has("drafter ended with exit code -9")
    assert [p["role"] for p in stack.state()["processes"]] == ["gateway"]
    assert exists(event["processes"][1]["pid"])
    assert not stack.task.done()
    stack.supervisor.on_signal()
    assert await stack.task == EXIT_DONE
    assert stack.delays == []


async def test_a_second_signal_kills(stack: Stack) -> None:
    stack.start(stack.spec("verifier", STUBBORN), stack.spec("gateway", STUBBORN))
    event = await stack.ready.get()
    stack.supervisor.on_signal()
    await stack.log.has("ignoring")
    assert all(exists(p["pid"]) for p in event["processes"])
    stack.supervisor.on_signal()
    assert await stack.task == EXIT_DONE
    assert not any(exists(p["pid"]) for p in event["processes"])


async def test_a_child_that_outstays_its_grace_is_killed(stack: Stack) -> None:
    stack.start(stack.spec("gateway", STUBBORN, grace_s=0.0))
    event = await stack.ready.get()
    stack.supervisor.on_signal()
    assert await stack.task == EXIT_DONE
    assert not exists(event["processes"][0]["pid"])


async def test_a_signal_during_the_start_stops_it(stack: Stack) -> None:
    stack.start(stack.spec("policy", GOOD), stack.spec("drafter", SILENT))
    await stack.log.has("policy ready after")
    stack.supervisor.on_signal()
    assert await stack.task == EXIT_DONE
    assert stack.ready.empty()


async def test_a_session_with_a_code_ends_the_stack(stack: Stack) -> None:
    stack.start(stack.spec("gateway", GOOD), session_code=1)
    assert await stack.task == 1
    assert any(line == "gateway drained" for line in stack.log.lines)


async def test_a_session_that_raises_ends_the_stack(tmp_path: Path) -> None:
    stack = Stack(tmp_path)

    async def session(event: dict[str, Any]) -> int | None:
        raise RuntimeError("session")

    supervisor = Supervisor([stack.spec("gateway", GOOD)], tmp_path, say=stack.log, forward=stack.log)
    with pytest.raises(RuntimeError, match="session"):
        await supervisor.run(session)
    assert not supervisor.children[0].alive


async def test_a_child_with_a_socket_is_ready_when_it_takes_connections(stack: Stack) -> None:
    script = (
        "import signal, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[3]); s.listen()\n"
        "while True: signal.pause()"
    )
    spec = stack.spec("redis", script, socket=stack.state_dir / "redis.mark")
    stack.start(spec)
    event = await stack.ready.get()
    assert [p["role"] for p in event["processes"]] == ["redis"]


async def test_what_a_child_left_behind_ends_with_it(stack: Stack) -> None:
    script = READY + (
        "import subprocess\n"
        "p = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        "print('grandchild', p.pid, file=sys.stderr, flush=True)\nready()\nsignal.pause()\n"
    )
    stack.start(stack.spec("gateway", script))
    await stack.ready.get()
    await stack.log.has("grandchild")
    pid = int(next(line for line in stack.log.lines if line.startswith("grandchild")).split()[1])
    grandchild = os.pidfd_open(pid)
    try:
        stack.supervisor.on_signal()
        assert await stack.task == EXIT_DONE
        assert select.select([grandchild], [], [], 60)[0] == [grandchild]
    finally:
        os.close(grandchild)
