"""Refusals over HTTP: status, code, field, headers, and no work for the verifier."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "nope"}, 404, "model_not_found", "model"),
        ({"stop": ["\ud800"]}, 400, "invalid_argument", "stop"),
        ({"messages": []}, 400, "invalid_argument", "messages"),
        ({"max_tokens": -1}, 400, "invalid_argument", "max_tokens"),
        ({"max_tokens": True}, 400, "invalid_argument", "max_tokens"),
        ({"temperature": "1"}, 400, "invalid_argument", "temperature"),
        ({"seed": 2**63}, 400, "invalid_argument", "seed"),
        ({"n": 9}, 400, "invalid_argument", "n"),
        ({"logit_bias": {"99999": 1}}, 400, "invalid_argument", "logit_bias"),
        (
            {"messages": [{"role": "user", "content": "the fox " * 900}]},
            400,
            "context_length_exceeded",
            "messages",
        ),
        ({"max_tokens": 511}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_argument", "messages"),
        ({"speculation": {"mode": "rejection"}}, 400, "invalid_argument", "speculation.mode"),
        ({"speculation": {"drafter": "nobody"}}, 400, "invalid_argument", "speculation.drafter"),
        ({"service_tier": "gold"}, 400, "invalid_argument", "service_tier"),
        ({"no_such": None}, 400, "invalid_argument", "no_such"),
    ],
)
async def test_errors(start: Any, change: Any, status: int, code: str, param: str) -> None:
    gateway = await start()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **change}
    response = await gateway.http.post(CHAT, content=json.dumps(body).encode())
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert not gateway.verifiers[0].calls


async def test_bodies_that_are_not_requests(start: Any) -> None:
    gateway = await start(max_body_bytes=2000)

    async def refused(content: bytes, status: int) -> str:
        response = await gateway.http.post(CHAT, content=content)
        assert response.status_code == status, response.text
        return str(response.json()["error"]["code"])

    async def chunked() -> Any:
        for _ in range(30):
            yield b" " * 100

    assert await refused(b"{", 400) == "invalid_argument"
    assert await refused(b"[]", 400) == "invalid_argument"
    assert await refused(b'{"temperature": NaN}', 400) == "invalid_argument"
    assert (
        await refused(b'{"temperature": 1e999, "model": "tiny", "messages": []}', 400) == "invalid_argument"
    )
    assert await refused(b"\xff\xfe", 400) == "invalid_argument"
    assert await refused(b"[" * 1999, 400) == "invalid_argument"
    assert await refused(b" " * 3000, 413) == "request_too_large"
    response = await gateway.http.post(CHAT, content=chunked())
    assert response.status_code == 413
    assert (await gateway.http.get("/nowhere")).json()["error"]["code"] == "not_found"
    assert (await gateway.http.get(CHAT)).status_code == 405
    assert (await gateway.http.get("/v1/models/none")).json()["error"]["code"] == "model_not_found"
    response = await gateway.post(CHAT, messages=MESSAGES, headers={"x-request-id": "a b"})
    assert response.json()["error"]["param"] == "x-request-id"


async def test_queue_full_is_refused_at_once(start: Any) -> None:
    def one_at_a_time(verifier: Any) -> None:
        verifier.max_sequences, verifier.hold_after = 1, 0

    gateway = await start(prepare=one_at_a_time, queue={"max_requests": 1})
    verifier = gateway.verifiers[0]
    first = asyncio.create_task(gateway.chat(max_tokens=4))
    await verifier.held.wait()
    second = asyncio.create_task(gateway.chat(max_tokens=4))
    while True:
        metrics = (await gateway.http.get("/metrics")).text
        if 'vllm:num_requests_waiting{model_name="tiny"} 1.0' in metrics:
            break
    refused = await gateway.post(CHAT, messages=MESSAGES, max_tokens=4)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    verifier.released.set()
    await asyncio.gather(first, second)


async def test_queue_wait_expires(start: Any) -> None:
    def one_at_a_time(verifier: Any) -> None:
        verifier.max_sequences, verifier.hold_after = 1, 0

    gateway = await start(prepare=one_at_a_time, queue_timeout_s=0.3)
    first = asyncio.create_task(gateway.chat(max_tokens=4))
    await gateway.verifiers[0].held.wait()
    late = await gateway.post(CHAT, messages=MESSAGES, max_tokens=4)
    assert late.status_code == 503
    assert late.headers["retry-after"]
    caller = await gateway.post(
        CHAT, messages=MESSAGES, max_tokens=4, headers={"x-stainless-read-timeout": "0.2"}
    )
    assert caller.status_code == 504
    assert caller.headers["x-should-retry"] == "false"
    gateway.verifiers[0].released.set()
    await first


async def test_typed_error_of_the_verifier_reaches_the_client(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "error", grpc.StatusCode.INVALID_ARGUMENT))
    response = await gateway.post(CHAT, messages=MESSAGES, max_tokens=4)
    assert response.status_code == 400
    assert "made by the test" in response.json()["error"]["message"]
