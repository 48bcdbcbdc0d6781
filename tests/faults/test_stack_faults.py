"""Children of a whole stack are killed or stopped under load: every request ends, and all is as before."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from system_stack import wait_until

pytestmark = pytest.mark.timeout(120)
CLIENTS = 16
TOKENS = 60


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    done: bool = False
    error: dict[str, Any] | None = None
    cut: bool = False
    """The connection ended."""


def ask(stack: Any, seed: int, started: threading.Semaphore, tokens: int = TOKENS) -> Answer:
    """One streamed chat; ``started`` is released at its first token."""
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": f"Count on from {seed}."}],
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
        "seed": seed,
        "max_tokens": tokens,
    }
    answer = Answer()
    try:
        with httpx.stream("POST", f"{stack.http}/v1/chat/completions", json=body, timeout=30) as response:
            if response.status_code != 200:
                answer.error = json.loads(response.read())["error"]
                return answer
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    answer.done = True
                elif line.startswith("data: "):
                    take(answer, json.loads(data), started)
    except (httpx.RemoteProtocolError, httpx.NetworkError):
        answer.cut = True
    return answer


def take(answer: Answer, chunk: dict[str, Any], started: threading.Semaphore) -> None:
    assert answer.error is None
    answer.error = chunk.get("error")
    for choice in chunk.get("choices", ()):
        assert not answer.finished
        if choice.get("token_ids") and not answer.tokens:
            started.release()
        answer.tokens += choice.get("token_ids") or ()
        answer.finished = choice.get("finish_reason") is not None


@contextmanager
def load(stack: Any, tokens: int = TOKENS) -> Iterator[list[Future[Answer]]]:
    """Sixteen clients, every one of them in the middle of its answer."""
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(ask, stack, seed, started, tokens) for seed in range(CLIENTS)]
        for _ in answers:
            assert started.acquire(timeout=20)
        assert not any(answer.done() for answer in answers)
        yield answers


def workers(stack: Any) -> dict[str, dict[str, Any]]:
    fleet = httpx.get(f"{stack.state()['admin']}/fleet", timeout=10).json()
    return {worker["id"]: worker for worker in fleet["workers"]}


def recovered(stack: Any) -> bool:
    """All workers are in service, and nothing is left of any request."""
    try:
        seen = workers(stack)
    except httpx.HTTPError:
        return False
    held = ("running", "sessions", "blocks_used")
    return set(seen) >= {"v0", "d0"} and all(
        worker["state"].lower() == "ready" and not any(worker.get(name) for name in held)
        for worker in seen.values()
    )


def frozen(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture(scope="module")
def expected(shared_stack: Any) -> list[list[int]]:
    with load(shared_stack) as answers:
        return [answer.result().tokens for answer in answers]


@pytest.fixture
def stack(shared_stack: Any, expected: list[list[int]]) -> Iterator[Any]:
    assert all(len(tokens) == TOKENS for tokens in expected)
    yield shared_stack
    wait_until(lambda: recovered(shared_stack), 10)
    after = ask(shared_stack, 0, threading.Semaphore(0))
    assert (after.tokens, after.done, after.error) == (expected[0], True, None)


@pytest.mark.parametrize("role", ["drafter", "policy", "redis", "verifier"])
def test_killed(stack: Any, expected: list[list[int]], role: str) -> None:
    with load(stack) as answers:
        killed = stack.kill(role)
    assert [answer.result() for answer in answers] == [Answer(tokens, True, True) for tokens in expected]
    wait_until(lambda: stack.pid(role) != killed, 10)


@pytest.mark.parametrize("role", ["drafter", "policy", "redis"])
def test_frozen_while_all_answers_end(stack: Any, expected: list[list[int]], role: str) -> None:
    pid = stack.pid(role)
    with load(stack) as answers:
        os.kill(pid, signal.SIGSTOP)
        try:
            done = [answer.result() for answer in answers]
            assert frozen(pid)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert done == [Answer(tokens, True, True) for tokens in expected]


def test_verifier_frozen_until_it_is_lost(stack: Any, expected: list[list[int]]) -> None:
    pid = stack.pid("verifier")
    with load(stack) as answers:
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: workers(stack)["v0"]["state"].lower() != "ready", 15)
            assert frozen(pid)
            assert not any(answer.done() for answer in answers)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert [answer.result() for answer in answers] == [Answer(tokens, True, True) for tokens in expected]


def test_redis_frozen_refuses_new_requests(stack: Any) -> None:
    pid = stack.pid("redis")
    os.kill(pid, signal.SIGSTOP)
    try:
        refused = ask(stack, 0, threading.Semaphore(0))
        assert frozen(pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert refused.error is not None
    assert refused.error["code"] == "unavailable"


def test_gateway_killed(stack: Any) -> None:
    with load(stack) as answers:
        killed = stack.kill("gateway")
    assert all(answer.result().cut and not answer.result().finished for answer in answers)
    wait_until(lambda: stack.pid("gateway") != killed, 10)
    stack.http = stack.state()["http"]


@pytest.mark.parametrize("signals", [1, 2])
def test_stopped_under_load(fresh_stack: Any, signals: int) -> None:
    """Answers that outlive the grace get a typed error; a second signal does not wait for that."""
    stack = fresh_stack
    pids = [process["pid"] for process in stack.state()["processes"]]
    private = Path(stack.ready["redis"].removeprefix("unix://")).parents[1]
    assert private.is_dir()
    with load(stack, tokens=2000) as answers:
        stack.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{stack.http}/readiness").status_code == 503, 5)
        if signals == 2:
            stack.process.send_signal(signal.SIGTERM)
        assert stack.process.wait(timeout=10) == 0
    for answer in (answer.result() for answer in answers):
        assert answer.tokens
        assert not answer.finished
        if signals == 2:
            assert answer.cut
        else:
            assert answer.error is not None
            assert answer.error["code"] == "unavailable"
    assert not private.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
