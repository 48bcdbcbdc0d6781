"""Bodies: what is taken, what is refused, and the field that is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.gateway.schema import ChatBody, CompletionBody, parse
from paceline.gateway.sse import dumps, frame

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def sampling(body: Any) -> Any:
    return body.sampling(vocab_size=1000, max_n=8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"logit_processors": []}, "logit_processors"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
        ({"messages": "hi"}, "messages"),
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1.0}, "n"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"speculation": {"max_draft_tokens": 17}}, "speculation.max_draft_tokens"),
        ({"speculation": {"mode": "rejection"}}, "speculation.mode"),
        ({"speculation": {"mode": "other"}}, "speculation.mode"),
        ({"speculation": {"k": 3}}, "speculation.k"),
        ({"unknown": 1}, "unknown"),
        ({"model": 3}, "model"),
    ],
)
def test_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(PacelineError) as caught:
        body = parse(ChatBody, {**CHAT, **change})
        sampling(body)
        body.speculation_options()
    assert caught.value.field == field
    assert field in caught.value.message


def test_what_asks_for_nothing_is_taken() -> None:
    harmless = {
        "tools": None,
        "response_format": {"type": "text"},
        "best_of": 1,
        "store": False,
        "metadata": None,
        "temperature": None,
        "stop": None,
        "stream_options": None,
        "user": "someone",
    }
    params = sampling(parse(ChatBody, {**CHAT, **harmless}))
    assert (params.temperature, params.n, params.seed, params.max_tokens, params.logprobs) == (
        1.0,
        1,
        None,
        None,
        None,
    )


def test_values_arrive() -> None:
    body = parse(
        ChatBody,
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "temperature": 0,
            "seed": -(2**63),
            "stop": "x",
            "max_tokens": 7,
            "max_completion_tokens": 7,
            "logit_bias": {"5": -100},
            "logprobs": True,
        },
    )
    params = sampling(body)
    assert (params.seed, params.stop, params.max_tokens) == (-(2**63), ("x",), 7)
    assert (params.logit_bias, params.logprobs, params.temperature) == ({5: -100.0}, 0, 0.0)
    assert [m.for_template() for m in body.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2]], ["a", [1]]])
def test_prompt_forms(prompt: Any) -> None:
    prompts = parse(CompletionBody, {"model": "m", "prompt": prompt}).prompts()
    assert prompts == ([prompt] if prompt in ("a", [1, 2]) else prompt)


@pytest.mark.parametrize("prompt", [None, [], [[]], [True], [1.5], {"a": 1}, [[1], None], ["a"] * 257])
def test_prompts_refused(prompt: Any) -> None:
    with pytest.raises(PacelineError) as caught:
        parse(CompletionBody, {"model": "m", "prompt": prompt})
    assert caught.value.field == "prompt"


def test_echo_with_logprobs_is_refused() -> None:
    with pytest.raises(PacelineError) as caught:
        sampling(parse(CompletionBody, {"model": "m", "prompt": "a", "echo": True, "logprobs": 1}))
    assert caught.value.field == "echo"


@given(text=st.text(alphabet=st.characters(), max_size=40))
def test_a_frame_is_one_line_whatever_the_text(text: str) -> None:
    data = frame({"text": text})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data[:-2].count(b"\n") == data.count(b"\r") == 0
    assert json.loads(data[6:])["text"] == text


def test_lone_surrogates_stay_json() -> None:
    assert json.loads(dumps("\ud800x")) == "\ud800x"
