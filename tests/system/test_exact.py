"""The promise on bytes, over HTTP with the real model: drafting, company and faults change nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from system_stack import PROMPTS, stream_chat, wait_until

pytestmark = pytest.mark.timeout(400)
MAX_TOKENS = 48


def ids(answer: dict[str, Any], choice: int = 0) -> list[int]:
    tokens: list[int] = answer["choices"][choice]["token_ids"]
    return tokens


def test_greedy_equals_generate_with_and_without_drafting(exact_stack: Any, generate: Any) -> None:
    accepted = 0
    for prompt in PROMPTS:
        expected = generate(prompt, MAX_TOKENS)
        drafted = exact_stack.chat(prompt, temperature=0, max_tokens=MAX_TOKENS)
        plain = exact_stack.chat(
            prompt,
            temperature=0,
            max_tokens=MAX_TOKENS,
            speculation={"enabled": False, "receipt": True},
        )
        assert ids(drafted) == expected
        assert ids(plain) == expected
        assert drafted["usage"]["completion_tokens"] == len(expected)
        receipt = drafted["speculation"]
        assert receipt["exact"] is True
        assert receipt["synthetic"] is False
        accepted += receipt["accepted_tokens"]
        off = plain["speculation"]
        assert off["drafted_tokens"] == off["verified_tokens"] == 0
        assert off["rounds"] == off["undrafted_rounds"]
    assert accepted > 0, "drafting took no part in this test"


def test_sampled_bytes_of_a_seed_do_not_depend_on_drafting(exact_stack: Any) -> None:
    accepted = 0
    for seed, prompt in enumerate(PROMPTS[:4]):
        common = {"temperature": 0.8, "seed": seed, "max_tokens": MAX_TOKENS, "top_p": 0.95}
        drafted = exact_stack.chat(prompt, **common)
        plain = exact_stack.chat(prompt, speculation={"enabled": False}, **common)
        assert ids(drafted) == ids(plain)
        assert drafted["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
        accepted += drafted["speculation"]["accepted_tokens"]
        other = exact_stack.chat(prompt, **{**common, "seed": seed + 1000})
        assert ids(other) != ids(drafted)
    assert accepted > 0


def test_choices_differ_from_each_other_and_repeat_with_the_seed(exact_stack: Any) -> None:
    fields = {"temperature": 0.9, "seed": 5, "n": 3, "max_tokens": 24}
    first = exact_stack.chat(PROMPTS[0], **fields)
    second = exact_stack.chat(PROMPTS[0], **fields)
    answers = [tuple(ids(first, i)) for i in range(3)]
    assert answers == [tuple(ids(second, i)) for i in range(3)]
    assert len(set(answers)) == 3
    assert [r["request_id"] for r in first["speculation"]] == [first["speculation"][0]["request_id"]] * 3


def test_sixteen_clients_get_their_solo_answers(exact_stack: Any) -> None:
    def ask(i: int) -> list[int]:
        greedy = i % 2 == 0
        sampling = {"temperature": 0} if greedy else {"temperature": 0.8, "seed": i}
        return ids(exact_stack.chat(f"{PROMPTS[i % len(PROMPTS)]} ({i})", max_tokens=16 + 2 * i, **sampling))

    solo = [ask(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == solo


@pytest.mark.parametrize("victim", ["drafter", "policy"])
def test_killing_a_helper_midway_changes_nothing(exact_stack: Any, generate: Any, victim: str) -> None:
    prompt = PROMPTS[4]  # a long answer, so that much of it follows the fault
    expected = generate(prompt, 96)
    tokens: list[int] = []
    killed = 0
    receipt: dict[str, Any] = {}
    for chunk in stream_chat(exact_stack, prompt, temperature=0, max_tokens=96):
        for choice in chunk["choices"]:
            tokens += choice.get("token_ids") or []
        receipt = chunk.get("speculation") or receipt
        if len(tokens) >= 4 and not killed:
            killed = exact_stack.kill(victim)
    assert killed
    assert tokens == expected
    if victim == "drafter":
        assert receipt["reasons"].get("no_drafter", 0) > 0, receipt
    # The supervisor brings it back under another pid.
    wait_until(lambda: exact_stack.pid(victim) != killed)
    assert not os.path.exists(f"/proc/{killed}")  # noqa: PTH110


def test_drafting_resumes_after_the_drafter_came_back(exact_stack: Any) -> None:
    def accepted() -> int:
        answer = exact_stack.chat(PROMPTS[1], temperature=0, max_tokens=MAX_TOKENS)
        return int(answer["speculation"]["accepted_tokens"])

    killed = exact_stack.kill("drafter")
    wait_until(lambda: exact_stack.pid("drafter") != killed)
    wait_until(lambda: accepted() > 0, timeout_s=60)
