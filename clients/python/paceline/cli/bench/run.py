"""Sends the load and takes the times.

Open loop: a request is due at its arrival time whatever happened to earlier ones, and its latency counts
from then, not from when the client got round to it (no coordinated omission). Closed loop: a fixed number in
flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.cli.bench.workload import Request
from paceline.cli.sse import ApiError, chunks


@dataclass
class Record:
    """One request as its user saw it; times in seconds since the benchmark's start.

    Attributes:
        due_s: arrival time (open loop), or when it was sent (closed loop).
        token_times_s: arrival of every output token; those of one chunk arrive together.
    """

    index: int
    due_s: float
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    error: str | None = None


class Load:
    """One benchmark against one server.

    Args:
        body: keys that every request carries (model, temperature, …).
        clock: seconds, monotonic.
        sleep: as asyncio.sleep.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        body: dict[str, Any],
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._body = body
        self._clock = clock or asyncio.get_running_loop().time
        self._sleep = sleep
        self._start_s = self._clock()

    async def open_loop(self, requests: Iterator[Request], times_s: Sequence[float]) -> list[Record]:
        """Sends one request at each time and waits for all to end."""
        self._start_s = self._clock()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for index, (at_s, request) in enumerate(zip(times_s, requests, strict=False)):
                if (wait_s := at_s - self._now()) > 0:
                    await self._sleep(wait_s)
                tasks.append(group.create_task(self._send(index, at_s, request)))
        return [task.result() for task in tasks]

    async def closed_loop(
        self, requests: Iterator[Request], concurrency: int, seconds: float
    ) -> list[Record]:
        """Keeps ``concurrency`` requests in flight for ``seconds``, then waits for the last ones."""
        self._start_s = self._clock()
        records: list[Record] = []
        indices = iter(range(1 << 62))

        async def user() -> None:
            while self._now() < seconds and (request := next(requests, None)) is not None:
                records.append(await self._send(next(indices), self._now(), request))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
        return sorted(records, key=lambda record: record.index)

    def _now(self) -> float:
        return self._clock() - self._start_s

    async def _send(self, index: int, due_s: float, request: Request) -> Record:
        record = Record(index, due_s, self._now())
        path = "/v1/completions" if request.token_ids else "/v1/chat/completions"
        try:
            async for chunk in chunks(self._client, path, self._request_body(index, request)):
                self._take(record, chunk)
        except ApiError as error:
            record.error = error.code
        except httpx.HTTPError as error:
            record.error = type(error).__name__
        record.ended_s = self._now()
        if record.error is None and not record.token_times_s:
            record.error = "no_tokens"
        return record

    def _request_body(self, index: int, request: Request) -> dict[str, Any]:
        body = {
            **self._body,
            "max_tokens": request.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "speculation": {**self._body.get("speculation", {}), "receipt": True},
            "seed": self._body["seed"] + index,
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.token_ids:
            return {**body, "prompt": list(request.token_ids)}
        return {**body, "messages": [{"role": "user", "content": request.text}]}

    def _take(self, record: Record, chunk: dict[str, Any]) -> None:
        now_s = self._now()
        for choice in chunk.get("choices", ()):
            ids = choice.get("token_ids")
            if ids is None:  # a server without the extension: one token a chunk with text
                ids = [0] if choice.get("delta", {}).get("content") or choice.get("text") else []
            record.token_times_s += [now_s] * len(ids)
        if usage := chunk.get("usage"):
            record.prompt_tokens = usage.get("prompt_tokens", 0)
        if receipt := chunk.get("speculation"):
            record.drafted_tokens = receipt.get("drafted_tokens", 0)
            record.verified_tokens = receipt.get("verified_tokens", 0)
            record.accepted_tokens = receipt.get("accepted_tokens", 0)
