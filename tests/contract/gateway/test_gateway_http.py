"""The OpenAI API over real HTTP, gRPC and queue; tokens are compared with the documented null rule."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from paceline.core.noise import Domain, noise_key
from paceline.core.nullmodel import null_token
from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def expected(tokenizer: Tokenizer, prompt: list[int], seed: int, choice: int, tokens: int) -> list[int]:
    key = noise_key(seed, choice, prompt, Domain.TARGET)
    output: list[int] = []
    for position in range(tokens):
        previous = output[-1] if output else prompt[-1]
        output.append(null_token(key, position, previous, tokenizer.get_vocab_size()))
    return output


async def test_chat_whole(start: Any, tokenizer: Tokenizer) -> None:
    gateway = await start()
    response = await gateway.post(
        CHAT,
        messages=MESSAGES,
        seed=4,
        max_tokens=20,
        ignore_eos=True,
        return_token_ids=True,
        speculation={"receipt": True},
        headers={"x-request-id": "abc-1"},
    )
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "abc-1"
    answer = response.json()
    prompt = tokenizer.encode(RENDERED, add_special_tokens=False).ids
    tokens = expected(tokenizer, prompt, 4, 0, 20)
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == tokens
    assert choice["message"]["content"] == tokenizer.decode(tokens)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 20,
        "total_tokens": len(prompt) + 20,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    receipt = answer["speculation"]
    assert (receipt["request_id"], receipt["seed"], receipt["rounds"]) == ("abc-1", 4, 7)
    assert receipt["verifiers"] == ["v0"]
    assert receipt["observed"]["e2e_ms"] >= receipt["observed"]["ttft_ms"] > 0
    sent = gateway.verifiers[0].calls[0].request
    assert list(sent.prompt_token_ids) == prompt
    assert sent.grant_epoch == 1

    view = (await gateway.admin.get("/requests/--last")).json()
    assert view["receipt"]["request_id"] == "abc-1"
    assert len(view["rounds"]) == 7
    assert view["terms_s"]["prefill"] == 0.25
    assert view["terms_s"]["queue"] > 0
    assert (view["neighbours"], view["break_even_rps"]) == ([], None)


async def test_chat_stream_is_the_same_answer(start: Any) -> None:
    gateway = await start()
    fields = {
        "messages": MESSAGES,
        "seed": 4,
        "max_tokens": 20,
        "ignore_eos": True,
        "n": 2,
        "return_token_ids": True,
        "speculation": {"receipt": True},
    }
    whole = await gateway.chat(**fields)
    chunks = [c async for c in gateway.stream(CHAT, **fields, stream_options={"include_usage": True})]
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert usage["speculation"] == chunks[-1]["speculation"]
    assert whole["usage"]["completion_tokens"] == 40
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [r["seed"] for r in chunks[-1]["speculation"]] == [4, 4]
    assert not any("speculation" in chunk for chunk in chunks[:-1])
    for index in (0, 1):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert parts[0]["delta"]["role"] == "assistant"
        assert not any("role" in part["delta"] for part in parts[1:])
        assert (
            "".join(p["delta"].get("content", "") for p in parts)
            == whole["choices"][index]["message"]["content"]
        )
        assert [t for p in parts for t in p.get("token_ids", [])] == whole["choices"][index]["token_ids"]
        assert [p["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == "length"
    assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]


async def test_end_of_sequence_and_multibyte_text(start: Any, tokenizer: Tokenizer) -> None:
    text = "한국어 🚴‍♀️ naïve"
    eos = tokenizer.token_to_id("<|im_end|>")
    gateway = await start(prepare=lambda v: setattr(v, "script", [*tokenizer.encode(text).ids, eos]))
    gateway.verifiers[0].round_tokens = 1
    pieces = []
    async for chunk in gateway.stream(CHAT, messages=MESSAGES, return_token_ids=True):
        if isinstance(chunk, dict):
            pieces.append(chunk["choices"][0])
    assert "".join(p["delta"].get("content", "") for p in pieces) == text
    assert not any("\ufffd" in p["delta"].get("content", "") for p in pieces)
    assert pieces[-1]["finish_reason"] == "stop"
    assert [t for p in pieces for t in p.get("token_ids", [])][-1] == eos


async def test_stop_string_ends_the_verifiers_work(start: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox jumps over").ids
    gateway = await start(prepare=lambda v: setattr(v, "script", ids * 8))
    verifier = gateway.verifiers[0]
    verifier.hold_after = len(ids) * 2
    answer = await gateway.chat(stop=["own f", "zzz"], max_tokens=200, speculation={"receipt": True})
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "the quick br"
    assert choice["finish_reason"] == "stop"
    await verifier.calls[0].ended.wait()
    assert verifier.aborted
    assert answer["speculation"]["rounds"] > 0
    assert answer["usage"]["completion_tokens"] < len(ids)


async def test_stop_string_ends_its_own_choice_only(start: Any, tokenizer: Tokenizer) -> None:
    gateway = await start()
    fields = {"seed": 3, "max_tokens": 40, "ignore_eos": True, "n": 2, "return_token_ids": True}
    plain = [choice["message"]["content"] for choice in (await gateway.chat(**fields))["choices"]]
    stop = next(plain[0][i : i + 3] for i in range(4, 40) if plain[0][i : i + 3] not in plain[1])
    cut = (await gateway.chat(**fields, stop=stop))["choices"]
    assert cut[0]["message"]["content"] == plain[0][: plain[0].index(stop)]
    assert cut[0]["finish_reason"] == "stop"
    assert cut[1]["message"]["content"] == plain[1]
    assert cut[1]["finish_reason"] == "length"
    assert gateway.verifiers[0].aborted == {(gateway.verifiers[0].calls[-1].request.request_id, 0)}


async def test_completions_of_every_prompt_form(start: Any, tokenizer: Tokenizer) -> None:
    gateway = await start()
    fields = {"seed": 1, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    ids = [tokenizer.encode(text).ids for text in ("one", "two")]
    texts = [tokenizer.decode(expected(tokenizer, prompt, 1, 0, 5)) for prompt in ids]
    for prompt, want in (
        ("one", texts[:1]),
        (ids[0], texts[:1]),
        (["one", "two"], texts),
        (ids, texts),
    ):
        answer = (await gateway.post("/v1/completions", prompt=prompt, **fields)).json()
        assert [c["text"] for c in answer["choices"]] == want
        assert [c["index"] for c in answer["choices"]] == list(range(len(want)))
        assert answer["choices"][-1]["prompt_token_ids"] == ids[len(want) - 1]
        assert answer["usage"]["completion_tokens"] == 5 * len(want)
    echoed = (await gateway.post("/v1/completions", prompt=["one", "two"], echo=True, **fields)).json()
    assert [c["text"] for c in echoed["choices"]] == [f"one{texts[0]}", f"two{texts[1]}"]
    streamed = {0: "", 1: ""}
    async for chunk in gateway.stream("/v1/completions", prompt=ids, echo=True, **fields):
        for choice in chunk["choices"] if isinstance(chunk, dict) else []:
            streamed[choice["index"]] += choice["text"]
    assert streamed == {0: f"one{texts[0]}", 1: f"two{texts[1]}"}


async def test_logprobs(start: Any) -> None:
    gateway = await start()
    answer = await gateway.chat(max_tokens=4, logprobs=True, top_logprobs=2, ignore_eos=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in content)
    body = {"prompt": "one", "max_tokens": 4, "logprobs": 1, "ignore_eos": True}
    choice = (await gateway.post("/v1/completions", **body)).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert choice["logprobs"]["text_offset"][0] == 0


async def test_openai_sdk(start: Any) -> None:
    gateway = await start()
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.addresses['http']}/v1", api_key="unused", max_retries=0
    ) as client:
        common: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 2}
        whole = await client.chat.completions.create(**common)
        text = ""
        async for chunk in await client.chat.completions.create(stream=True, **common):
            for choice in chunk.choices:
                text += choice.delta.content or ""
        assert text == whole.choices[0].message.content
        assert [m.id async for m in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                **common, tools=[{"type": "function", "function": {"name": "f"}}]
            )
        assert (caught.value.code, caught.value.param) == ("invalid_argument", "tools")


async def test_small_endpoints(start: Any, tokenizer: Tokenizer) -> None:
    gateway = await start()
    for path in ("/health", "/liveness", "/readiness"):
        assert (await gateway.http.get(path)).status_code == 200
    assert (await gateway.http.get("/version")).json()["version"]
    ids = tokenizer.encode("the fox").ids
    answer = (await gateway.post("/tokenize", prompt="the fox")).json()
    assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert (await gateway.post("/detokenize", tokens=ids)).json() == {"prompt": "the fox"}
    chat = (await gateway.post("/tokenize", messages=MESSAGES)).json()["tokens"]
    assert chat == tokenizer.encode(RENDERED).ids
    await gateway.chat(max_tokens=4)
    metrics = (await gateway.http.get("/metrics")).text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 4.0' in metrics
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in metrics


async def test_grpc_takes_the_same_requests(start: Any, tokenizer: Tokenizer) -> None:
    gateway = await start()
    stub: Any = inference_pb2_grpc.InferenceStub(gateway.grpc)
    sampling = common_pb2.SamplingParams(seed=4, max_tokens=20, ignore_eos=True, n=2)
    messages = inference_pb2.Messages(messages=[inference_pb2.Message(role="user", content="hello")])
    request = inference_pb2.GenerateRequest(
        model="tiny",
        messages=messages,
        sampling=sampling,
        speculation=common_pb2.SpeculationOptions(receipt=True),
    )
    whole = await gateway.chat(seed=4, max_tokens=20, ignore_eos=True, n=2, return_token_ids=True)
    texts, ids, last = {0: "", 1: ""}, {0: [], 1: []}, None
    finishes, receipts = 0, 0
    call = stub.Generate(request)
    async for response in call:
        texts[response.choice_index] += response.text
        ids[response.choice_index] += response.token_ids
        finishes += response.finish_reason == common_pb2.FINISH_REASON_LENGTH
        receipts += response.HasField("speculation")
        last = response
    assert texts == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert ids == {c["index"]: c["token_ids"] for c in whole["choices"]}
    assert (finishes, receipts) == (2, 2)
    assert last is not None
    assert last.usage.completion_tokens == 40
    cards = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(m.id, m.max_context_tokens) for m in cards.models] == [("tiny", 512)]
    tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(model="tiny", messages=messages))
    assert list(tokens.token_ids) == tokenizer.encode(RENDERED).ids
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(inference_pb2.TokenizeRequest(model="nope", prompt="x"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert not (await stub.Cancel(inference_pb2.CancelRequest(request_id="none"))).cancelled


async def test_dropping_a_grpc_call_ends_the_verifiers_call(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 3))
    stub: Any = inference_pb2_grpc.InferenceStub(gateway.grpc)
    call = stub.Generate(inference_pb2.GenerateRequest(model="tiny", prompt="one"))
    assert (await call.read()).token_ids
    call.cancel()
    verifier = gateway.verifiers[0]
    await verifier.calls[0].ended.wait()
    assert verifier.calls[0].cancelled


async def test_grpc_cancel_ends_a_http_request(start: Any) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 3))
    stub: Any = inference_pb2_grpc.InferenceStub(gateway.grpc)
    running = asyncio.create_task(
        gateway.post(CHAT, messages=MESSAGES, max_tokens=9, headers={"x-request-id": "mine"})
    )
    verifier = gateway.verifiers[0]
    await verifier.held.wait()
    twice = await gateway.post(CHAT, messages=MESSAGES, headers={"x-request-id": "mine"})
    assert twice.status_code == 409
    assert (await stub.Cancel(inference_pb2.CancelRequest(request_id="mine"))).cancelled
    response: httpx.Response = await running
    assert response.json()["error"]["code"] == "cancelled"
    await verifier.calls[0].ended.wait()
    assert verifier.calls[0].cancelled
