"""A whole Paceline stack as child processes, started with the product's own command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PACELINE = str(Path(sys.executable).with_name("paceline"))


PROMPTS = (
    "Write one sentence about the sea.",
    "Repeat this text word for word: The quick brown fox jumps over the lazy dog. The dog sleeps all day.",
    "List the numbers from one to ten, separated by commas.",
    "What is the capital of France, and what is it known for?",
    "Explain in simple words why the sky is blue.",
    "Translate into French: I would like a cup of coffee, please.",
)


class Stack:
    """``paceline up`` with free ports, its ready event, and the means to hurt it."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], *, testing: bool = True) -> None:
        self.run_dir = run_dir
        command = [PACELINE, "up", "--port", "0", "--run-dir", str(run_dir)]
        for key, value in settings.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        environ = dict(os.environ)
        environ.pop("PACELINE_TESTING", None)
        if testing:
            environ["PACELINE_TESTING"] = "1"
        self.log = run_dir.parent / f"{run_dir.name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environ)
        line = self.process.stdout.readline() if self.process.stdout else b""
        if not line:
            raise RuntimeError(f"exit {self.process.wait()}: {self.log.read_text()[-4000:]}")
        self.ready: dict[str, Any] = json.loads(line)
        self.http: str = self.ready["http"]
        self.admin: str = self.ready["admin"]
        self.model: str = httpx.get(f"{self.http}/v1/models").json()["data"][0]["id"]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.run_dir / "state.json").read_text())
        return state

    def pid(self, role: str) -> int:
        return next(int(p["pid"]) for p in self.state()["processes"] if p["role"] == role)

    def kill(self, role: str) -> int:
        """kill -9 of one child; returns the pid that died."""
        pid = self.pid(role)
        os.kill(pid, signal.SIGKILL)
        return pid

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> httpx.Response:
        return httpx.post(f"{self.http}{path}", json=body, timeout=180, **kwargs)

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "return_token_ids": True,
            "speculation": {"receipt": True},
            **fields,
        }
        response = self.post("/v1/chat/completions", body)
        if response.status_code != 200:
            raise AssertionError(response.text)
        answer: dict[str, Any] = response.json()
        return answer

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def running(run_dir: Path, settings: dict[str, Any], *, testing: bool = True) -> Iterator[Stack]:
    stack = Stack(run_dir, settings, testing=testing)
    try:
        yield stack
    finally:
        if stack.process.poll() is None:
            stack.stop()
        if stack.process.stdout:
            stack.process.stdout.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Polls a condition of another process; fails loudly at the deadline."""
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("condition not met in time")
        pause.wait(0.05)


def stream_chat(stack: Stack, content: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Chunks of a streamed chat, up to ``[DONE]``."""
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "return_token_ids": True,
        "speculation": {"receipt": True},
        **fields,
    }
    done = False
    with httpx.stream("POST", f"{stack.http}/v1/chat/completions", json=body, timeout=180) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                done = True
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise AssertionError(chunk)
            yield chunk
    if not done:
        raise AssertionError("stream ended without [DONE]")
