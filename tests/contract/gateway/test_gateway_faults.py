"""Losses and departures: no token twice, no work for clients that left, one terminal event a request."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from paceline.core.noise import Domain, noise_key
from paceline.core.nullmodel import null_token

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
FIELDS = {"messages": MESSAGES, "seed": 4, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def expected(tiny_model: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    prompt = tokenizer.encode(RENDERED).ids
    key = noise_key(4, 0, prompt, Domain.TARGET)
    output: list[int] = []
    for position in range(20):
        previous = output[-1] if output else prompt[-1]
        output.append(null_token(key, position, previous, tokenizer.get_vocab_size()))
    return output


async def collect(gateway: Any, tokens: list[int], **fields: Any) -> list[Any]:
    chunks = []
    async for chunk in gateway.stream(CHAT, **FIELDS, **fields):
        chunks.append(chunk)
        if isinstance(chunk, dict) and "error" not in chunk:
            tokens += [t for choice in chunk["choices"] for t in choice.get("token_ids", [])]
    return chunks


async def held(gateway: Any) -> Any:
    """The verifier that holds the running request."""
    waits = {asyncio.create_task(v.held.wait()): v for v in gateway.verifiers}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return waits[done.pop()]


async def test_a_loss_between_the_last_token_and_the_finish_ends_the_answer(
    start: Any, expected: list[int]
) -> None:
    gateway = await start(verifiers=2, prepare=lambda v: setattr(v, "hold_after", 20))
    tokens: list[int] = []
    stream = asyncio.create_task(collect(gateway, tokens, speculation={"receipt": True}))
    first = await held(gateway)
    second = next(v for v in gateway.verifiers if v is not first)
    await first.kill()
    chunks = await stream
    assert chunks[-1] == "[DONE]"
    assert tokens == expected
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "length"
    assert not second.calls, "a whole answer was generated on"


@pytest.mark.parametrize("overlap_tokens", [0, 2])
async def test_a_lost_verifier_is_not_seen_by_the_client(
    start: Any, expected: list[int], overlap_tokens: int
) -> None:
    gateway = await start(verifiers=2, prepare=lambda v: setattr(v, "hold_after", 9))
    tokens: list[int] = []
    stream = asyncio.create_task(collect(gateway, tokens, speculation={"receipt": True}))
    first = await held(gateway)
    second = next(v for v in gateway.verifiers if v is not first)
    second.hold_after, second.overlap_tokens = None, overlap_tokens
    await first.kill()
    chunks = await stream
    assert chunks[-1] == "[DONE]"
    assert tokens == expected
    resumed = second.calls[0].request
    assert list(resumed.committed_token_ids) == expected[:9]
    assert resumed.grant_epoch > first.calls[0].request.grant_epoch
    receipt = chunks[-2]["speculation"]
    assert receipt["verifiers"] == [first.id, second.id]
    assert receipt["resumes"] == 1
    assert receipt["exact"] is True
    states = {first.id: "lost", second.id: "ready"}
    fleet = (await gateway.admin.get("/fleet")).json()
    while {w["id"]: w["state"] for w in fleet["workers"]} != states:
        fleet = (await gateway.admin.get("/fleet")).json()
    assert fleet["plan_age_s"] is None


async def test_a_lost_verifier_without_streaming(start: Any, expected: list[int]) -> None:
    gateway = await start(verifiers=2, prepare=lambda v: setattr(v, "hold_after", 9))
    answer = asyncio.create_task(gateway.chat(**FIELDS))
    first = await held(gateway)
    for verifier in gateway.verifiers:
        verifier.hold_after = None
    await first.kill()
    assert (await answer)["choices"][0]["token_ids"] == expected


async def test_the_only_verifier_is_waited_for(start: Any, tiny_model: Path, expected: list[int]) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 9))
    tokens: list[int] = []
    stream = asyncio.create_task(collect(gateway, tokens))
    first = await held(gateway)
    port = int(first.address.rsplit(":", 1)[1])
    await first.kill()
    successor = type(first)("v0", first.files, "tiny")
    await successor.start(port)
    try:
        assert (await stream)[-1] == "[DONE]"
        assert tokens == expected
    finally:
        await successor.kill()


async def test_losses_end_in_a_typed_error(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "error", grpc.StatusCode.UNAVAILABLE))
    response = await gateway.post(CHAT, messages=MESSAGES, max_tokens=4)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "verifiers were lost" in response.json()["error"]["message"]
    assert len(gateway.verifiers[0].calls) == 3


async def test_loss_after_headers_is_an_error_frame(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 3))
    verifier = gateway.verifiers[0]
    stream = asyncio.create_task(collect(gateway, []))
    await verifier.held.wait()
    verifier.error = grpc.StatusCode.UNAVAILABLE
    # The call that runs ends as if its verifier stopped; the next ones fail at once.
    verifier.aborted.add((verifier.calls[0].request.request_id, 0))
    verifier.released.set()
    chunks = await stream
    assert chunks[-2]["error"]["code"] == "unavailable"
    assert chunks[-1] == "[DONE]"


async def test_leaving_a_stream_ends_the_verifiers_call(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 3))
    verifier = gateway.verifiers[0]
    async with gateway.http.stream(
        "POST", CHAT, json={"model": "tiny", "stream": True, **FIELDS}
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
    await verifier.calls[0].ended.wait()
    assert verifier.calls[0].cancelled
    await idle(gateway)


async def test_leaving_without_streaming_ends_the_verifiers_call(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 3))
    verifier = gateway.verifiers[0]
    async with httpx.AsyncClient(base_url=gateway.addresses["http"], trust_env=False) as client:
        request = asyncio.create_task(client.post(CHAT, json={"model": "tiny", **FIELDS, "n": 2}))
        async with verifier.called:
            await verifier.called.wait_for(lambda: len(verifier.calls) == 2)
        await verifier.held.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    for call in verifier.calls:
        await call.ended.wait()
        assert call.cancelled
    await idle(gateway)


async def test_leaving_the_queue_frees_the_slot(start: Any) -> None:
    def one_at_a_time(verifier: Any) -> None:
        verifier.max_sequences, verifier.hold_after = 1, 0

    gateway = await start(prepare=one_at_a_time)
    verifier = gateway.verifiers[0]
    first = asyncio.create_task(gateway.chat(max_tokens=4))
    await verifier.held.wait()
    async with httpx.AsyncClient(base_url=gateway.addresses["http"], trust_env=False) as client:
        request = asyncio.create_task(client.post(CHAT, json={"model": "tiny", **FIELDS}))
        while 'vllm:num_requests_waiting{model_name="tiny"} 1.0' not in await metrics(gateway):
            pass
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    while 'vllm:num_requests_waiting{model_name="tiny"} 0.0' not in await metrics(gateway):
        pass
    verifier.released.set()
    await first
    assert len(verifier.calls) == 1


async def test_drain(start: Any, expected: list[int]) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 9))
    tokens: list[int] = []
    stream = asyncio.create_task(collect(gateway, tokens))
    await gateway.verifiers[0].held.wait()
    gateway.context.stopping.set()
    while (await gateway.http.get("/readiness")).status_code != 503:
        pass
    assert (await gateway.http.get("/liveness")).status_code == 200
    refused = await gateway.post(CHAT, messages=MESSAGES)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    gateway.verifiers[0].released.set()
    assert (await stream)[-1] == "[DONE]"
    assert tokens == expected
    await gateway.task
    with pytest.raises(httpx.ConnectError):
        await gateway.http.get("/liveness")


async def test_a_drain_beyond_its_grace_ends_streams_with_an_error(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 9), grace_s=0.2)
    stream = asyncio.create_task(collect(gateway, []))
    await gateway.verifiers[0].held.wait()
    gateway.context.stopping.set()
    chunks = await stream
    assert chunks[-2]["error"]["code"] == "unavailable"
    await gateway.task


async def test_a_foreign_tokenizer_is_refused(start: Any) -> None:
    gateway = await start(
        verifiers=2, prepare=lambda v: setattr(v, "fingerprint", "other" if v.id == "v0" else v.fingerprint)
    )
    for _ in range(3):
        await gateway.chat(max_tokens=2)
    assert not gateway.verifiers[0].calls
    assert len(gateway.verifiers[1].calls) == 3


async def test_draining_a_worker_moves_work_elsewhere(start: Any) -> None:
    gateway = await start(verifiers=2)
    await gateway.chat(max_tokens=2)
    answer = (await gateway.admin.post("/workers/v0/drain")).json()
    assert answer == {"id": "v0", "state": "draining"}
    before = len(gateway.verifiers[0].calls)
    for _ in range(3):
        await gateway.chat(max_tokens=2)
    assert len(gateway.verifiers[0].calls) == before
    assert (await gateway.admin.post("/workers/none/drain")).status_code == 404


async def test_testing_route(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await start()
    body = {"worker": "all", "slowdown": 2, "acceptance": None, "nan_request": "r1"}
    monkeypatch.delenv("PACELINE_TESTING", raising=False)
    assert (await gateway.admin.post("/testing", json=body)).status_code == 403
    monkeypatch.setenv("PACELINE_TESTING", "1")
    assert (await gateway.admin.post("/testing", json=body)).status_code == 200
    sent = gateway.verifiers[0].testing[0]
    assert (sent.slowdown, sent.nan_request, sent.acceptance) == (2.0, "r1", -1.0), "null clears it"
    assert (await gateway.admin.post("/testing", json={"speed": 2})).json()["error"]["param"] == "speed"
    assert (await gateway.admin.post("/testing", json={"slowdown": 0.5})).status_code == 400


async def test_a_reader_that_takes_nothing_is_cut(start: Any) -> None:
    """Small buffers on both ends fill up; the gateway must give the request up, not keep it for ever."""
    gateway = await start(stall_timeout_s=0.3, max_body_bytes=1 << 20)
    verifier = gateway.verifiers[0]
    verifier.round_tokens = 1
    host, port = gateway.addresses["http"].removeprefix("http://").split(":")
    body = {
        "model": "tiny",
        "prompt": ["the fox"] * 64,
        "stream": True,
        "n": 8,
        "max_tokens": 400,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    content = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        await loop.sock_sendall(client, head.encode() + content)
        while 'paceline_request_errors_total{code="cancelled"}' not in await metrics(gateway):
            pass
        await idle(gateway)


async def metrics(gateway: Any) -> str:
    text: str = (await gateway.http.get("/metrics")).text
    return text


async def idle(gateway: Any) -> None:
    while 'vllm:num_requests_running{model_name="tiny"} 0.0' not in await metrics(gateway):
        pass
