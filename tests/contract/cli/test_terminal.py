"""`chat`, `explain`, `top` and the demo's answer against a small server that speaks the contract."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.cli.answers import http_client, stream_answer
from paceline.cli.sse import ApiError
from paceline.wire.admin import HttpServer

PACELINE = Path(sys.executable).with_name("paceline")
RECEIPT = {
    "request_id": "r1",
    "verifiers": ["v0"],
    "drafters": [{"id": "d0", "kind": "ngram"}],
    "rounds": 2,
    "undrafted_rounds": 0,
    "drafted_tokens": 4,
    "verified_tokens": 4,
    "accepted_tokens": 3,
    "observed": {"queue_ms": 0.0, "ttft_ms": 12.0, "tpot_ms": 3.5, "e2e_ms": 30.0},
}
EXPLAINED = {
    "receipt": RECEIPT,
    "rounds": [{"k": 4, "asked": 4, "arrived": 4, "accepted": 3, "waited_ms": 0.5, "reason": "best"}],
    "terms_s": {"prefill": 0.01, "draft": 0.002, "verify": 0.02, "network": 0.001, "queue": 0.0},
    "neighbours": [],
    "break_even_rps": None,
}
FLEET = {
    "workers": [{"id": "v0", "role": "verifier", "state": "ready", "pid": 7, "running": 1, "alpha": 0.75}],
    "pairs": [{"verifier": "v0", "drafter": "d0", "weight": 1.0, "k": 4, "predicted_tpot_ms": 3.25}],
    "plan_age_s": 0.1,
}
ERROR = {"error": {"message": "no room", "type": "overloaded_error", "param": None, "code": "queue_full"}}


class Served:
    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    seen = Served()

    async def chat(request: Request) -> Response:
        body = await request.json()
        seen.bodies.append(body)
        if body["messages"][-1]["content"] == "refuse":
            return JSONResponse(ERROR, 429)
        text = {"delta": {"content": "Hel"}}, {"delta": {"content": "lo"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 5}
        chunks = [*({"choices": [c]} for c in text), {"choices": [], "usage": usage, "speculation": RECEIPT}]
        if body["messages"][-1]["content"] == "break":
            chunks[1:] = [ERROR]
        frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(frames), media_type="text/event-stream")

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny"}]})

    async def explained(request: Request) -> Response:
        if request.path_params["id"] in ("r1", "last"):
            return JSONResponse(EXPLAINED)
        return JSONResponse({"error": {"message": "no such request", "code": "not_found"}}, 404)

    async def fleet(_: Request) -> Response:
        return JSONResponse(FLEET)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/requests/{id}", explained),
            Route("/fleet", fleet),
        ]
    )
    server = HttpServer(app)
    seen.url = await server.start("127.0.0.1", 0)
    yield seen
    await server.stop()


async def ran(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(PACELINE, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await process.communicate(stdin.encode())
    return process.returncode or 0, out.decode(), err.decode()


async def test_chat_prints_the_answer_alone_on_stdout(served: Served) -> None:
    code, out, err = await ran("chat", "--url", served.url, "--prompt", "hi", "--seed", "4", "--receipt")
    assert (code, out) == (0, "Hello\n")
    assert "3" in err
    assert "d0 (ngram)" in err
    (body,) = served.bodies
    assert (body["model"], body["seed"], body["stream"]) == ("tiny", 4, True)
    assert body["messages"] == [{"role": "user", "content": "hi"}]


async def test_chat_reads_stdin_and_prints_json(served: Served) -> None:
    code, out, _ = await ran("chat", "--url", served.url, "--system", "short", "--json", stdin="hi")
    assert code == 0
    assert json.loads(out) == {"text": "Hello", "finish_reason": "stop", "speculation": RECEIPT}
    assert [m["role"] for m in served.bodies[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize("prompt", ["refuse", "break"])
async def test_chat_names_the_servers_error(served: Served, prompt: str) -> None:
    code, _, err = await ran("chat", "--url", served.url, "--prompt", prompt)
    assert code == 1
    assert "queue_full: no room" in err


async def test_an_empty_prompt_is_wrong_usage(served: Served) -> None:
    assert (await ran("chat", "--url", served.url, stdin=""))[0] == 2


async def test_an_answer_counts_its_tokens(served: Served) -> None:
    pieces: list[str] = []
    async with http_client(served.url) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        answer = await stream_answer(client, body, pieces.append)
        with pytest.raises(ApiError, match="queue_full"):
            await stream_answer(client, {"messages": [{"role": "user", "content": "break"}]}, pieces.append)
    assert pieces == ["Hel", "lo", "Hel"]
    assert (answer.text, answer.completion_tokens, answer.receipt) == ("Hello", 5, RECEIPT)
    assert answer.tokens_per_s == pytest.approx(5 / answer.e2e_s)


async def test_explain(served: Served) -> None:
    code, out, _ = await ran("explain", "r1", "--admin", served.url, "--json")
    assert (code, json.loads(out)) == (0, EXPLAINED)
    code, out, _ = await ran("explain", "--last", "--admin", served.url)
    assert code == 0
    assert "0.0200 s" in out
    assert "3 of 4 verified draft tokens accepted" in out
    code, _, err = await ran("explain", "r2", "--admin", served.url)
    assert code == 1
    assert "not_found: no such request" in err


async def test_top_as_json_reads_once(served: Served) -> None:
    code, out, _ = await ran("top", "--admin", served.url, "--json")
    assert (code, json.loads(out)) == (0, FLEET)
