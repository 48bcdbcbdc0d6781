"""The openai SDK, sync and async, against the real model."""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytestmark = pytest.mark.timeout(300)
MESSAGES: Any = [{"role": "user", "content": "Say hello in three words."}]


@pytest.fixture
def client(exact_stack: Any) -> Any:
    with openai.OpenAI(base_url=f"{exact_stack.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models(client: Any, exact_stack: Any) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == [exact_stack.model]
    assert client.models.retrieve(exact_stack.model).id == exact_stack.model


def test_chat_streaming_equals_not_streaming(client: Any, exact_stack: Any) -> None:
    common = {"model": exact_stack.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**common)
    text, finish, usage, roles = "", None, None, []
    for chunk in client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **common
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles.append(choice.delta.role)
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert roles[0] == "assistant"
    assert not any(roles[1:])


def test_completions(client: Any, exact_stack: Any) -> None:
    common = {"model": exact_stack.model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
    whole = client.completions.create(**common)
    streamed = "".join(
        c.choices[0].text for c in client.completions.create(stream=True, **common) if c.choices
    )
    assert streamed == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    many = client.completions.create(**{**common, "prompt": ["Once upon a time", "Two plus two is"]})
    assert [c.index for c in many.choices] == [0, 1]
    assert many.choices[0].text == whole.choices[0].text


async def test_async_client(exact_stack: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{exact_stack.http}/v1", api_key="unused") as client:
        common: Any = {"model": exact_stack.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
        whole = await client.chat.completions.create(**common)
        text = ""
        async for chunk in await client.chat.completions.create(stream=True, **common):
            for choice in chunk.choices:
                text += choice.delta.content or ""
        assert text == whole.choices[0].message.content
        assert [m.id async for m in client.models.list()] == [exact_stack.model]


def test_logprobs_are_the_targets_raw_ones(client: Any, exact_stack: Any) -> None:
    answer = client.chat.completions.create(
        model=exact_stack.model, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        # Greedy: the chosen token is the most likely one.
        assert token.logprob == max(t.logprob for t in token.top_logprobs)


def test_stop_string_is_left_out(client: Any, exact_stack: Any) -> None:
    common = {"model": exact_stack.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    text = client.chat.completions.create(**common).choices[0].message.content
    stop = text[3:6]
    cut = client.chat.completions.create(stop=[stop], **common).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "nope"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_argument", "messages"),
        ({"max_tokens": -1}, 400, "invalid_argument", "max_tokens"),
        ({"temperature": -1}, 400, "invalid_argument", "temperature"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            400,
            "context_length_exceeded",
            "messages",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "invalid_argument", "tools"),
        ({"extra_body": {"no_such_field": 1}}, 400, "invalid_argument", "no_such_field"),
        ({"extra_body": {"speculation": {"mode": "rejection"}}}, 400, "invalid_argument", "speculation.mode"),
        (
            {"extra_body": {"speculation": {"drafter": "nobody"}}},
            400,
            "invalid_argument",
            "speculation.drafter",
        ),
        ({"n": 1000}, 400, "invalid_argument", "n"),
    ],
)
def test_errors(client: Any, exact_stack: Any, change: Any, status: int, code: str, param: str) -> None:
    fields = {"model": exact_stack.model, "messages": MESSAGES, "max_tokens": 4, **change}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**fields)
    error = caught.value
    assert error.status_code == status, error.body
    assert (error.code, error.param) == (code, param)
    assert error.type in {"invalid_request_error", "not_found_error"}
