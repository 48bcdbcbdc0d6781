"""`paceline bench` against a small HTTP server: open loop, closed loop, errors, the command itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from paceline.cli.bench.report import ttft_ms
from paceline.cli.bench.run import Load
from paceline.cli.bench.workload import Request

BODY = {"model": "m", "seed": 5, "temperature": 0.0}
Handler = Callable[[str, dict[str, Any]], Awaitable[tuple[int, list[Any]]]]


@asynccontextmanager
async def server(handle: Handler) -> AsyncIterator[httpx.AsyncClient]:
    """Answers POSTs with the events that ``handle(path, body)`` returns."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(
            next(h.split(":")[1] for h in head.lower().split("\r\n") if h.startswith("content-length"))
        )
        status, events = await handle(head.split()[1], json.loads(await reader.readexactly(length)))
        if status == 200:
            body = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events)
        else:
            body = json.dumps(events[0])
        writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(connection, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client


def answer(*chunks: list[int]) -> list[Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": sum(map(len, chunks))}
    receipt = {"drafted_tokens": 5, "verified_tokens": 4, "accepted_tokens": 3}
    return [
        {"choices": [{"delta": {"role": "assistant"}}]},
        *({"choices": [{"delta": {"content": "x"}, "token_ids": ids}]} for ids in chunks),
        {"choices": [], "usage": usage, "speculation": receipt},
        "[DONE]",
    ]


def asking(text: str = "hello") -> Iterator[Request]:
    while True:
        yield Request(text=text, output_tokens=4)


async def test_a_stalled_answer_does_not_delay_later_requests() -> None:
    """The server answers nobody until all five have come: a client that waited would wait for ever."""
    arrived: list[dict[str, Any]] = []
    everyone = asyncio.Event()

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
        arrived.append(body)
        if len(arrived) == 5:
            everyone.set()
        await everyone.wait()
        return 200, answer([1])

    async with server(handle) as client:
        records = await Load(client, BODY).open_loop(asking(), [0.0] * 5)
    assert [record.error for record in records] == [None] * 5
    assert sorted(body["seed"] for body in arrived) == [5, 6, 7, 8, 9]


async def test_latency_counts_from_the_time_a_request_was_due() -> None:
    """The client is late by 2 s (its sleep overruns): users would have waited those 2 s too."""
    now = 100.0

    async def late(seconds: float) -> None:
        nonlocal now
        now += seconds + 2.0

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
        return 200, answer([1])

    async with server(handle) as client:
        load = Load(client, BODY, clock=lambda: now, sleep=late)
        (record,) = await load.open_loop(asking(), [3.0])
    assert record.due_s == 3.0
    assert record.sent_s == 5.0
    assert ttft_ms(record) == 2000.0


async def test_what_is_asked_and_what_is_taken_from_the_answer() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
        asked.append((path, body))
        return 200, answer([1], [2, 3], [])

    requests = iter(
        [Request(text="hi", output_tokens=4), Request(token_ids=(7, 8), output_tokens=9, ignore_eos=True)]
    )
    async with server(handle) as client:
        records = await Load(client, BODY).open_loop(requests, [0.0, 0.0])
    bodies = dict(asked)
    chat, completion = bodies["/v1/chat/completions"], bodies["/v1/completions"]
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["max_tokens"] == 4
    assert "ignore_eos" not in chat
    assert (completion["prompt"], completion["max_tokens"], completion["ignore_eos"]) == ([7, 8], 9, True)
    for body in (chat, completion):
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["return_token_ids"] is True
        assert body["speculation"] == {"receipt": True}
    for record in records:
        assert len(record.token_times_s) == 3
        assert (record.prompt_tokens, record.drafted_tokens) == (3, 5)
        assert (record.verified_tokens, record.accepted_tokens) == (4, 3)


async def test_closed_loop_keeps_its_number_in_flight() -> None:
    now = 0.0
    in_flight = most = served = 0
    full = asyncio.Event()

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
        nonlocal now, in_flight, most, served
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 3:
            full.set()
        await full.wait()
        served += 1
        in_flight -= 1
        now = served / 10
        return 200, answer([1])

    async with server(handle) as client:
        load = Load(client, BODY, clock=lambda: now)
        records = await load.closed_loop(asking(), concurrency=3, seconds=1.0)
    assert most == 3
    assert served == len(records)
    assert 10 <= served <= 12  # ten reach 1 s, two more may be in flight by then
    assert [record.index for record in records] == list(range(served))


async def test_failures_are_recorded_by_code() -> None:
    error = {"error": {"message": "m", "type": "t", "param": None, "code": "queue_full"}}
    answers: dict[int, tuple[int, list[Any]]] = {
        5: (429, [error]),
        6: (500, ["oops"]),
        7: (200, [{"choices": [{"delta": {"content": "x"}, "token_ids": [1]}]}, error, "[DONE]"]),
        8: (200, [{"choices": [{"delta": {"content": "x"}, "token_ids": [1]}]}]),
        9: (200, ["[DONE]"]),
    }

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
        return answers[body["seed"]]

    async with server(handle) as client:
        records = await Load(client, BODY).open_loop(asking(), [0.0] * 5)
    assert [r.error for r in records] == ["queue_full", "http_500", "queue_full", "stream_cut", "no_tokens"]


async def test_nobody_there_is_an_error_of_the_request() -> None:
    async def handle(path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
        return 200, []

    async with server(handle) as client:
        base_url = client.base_url
    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
        (record,) = await Load(client, BODY).open_loop(asking(), [0.0])
    assert record.error == "ConnectError"
