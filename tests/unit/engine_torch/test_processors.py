"""Processors follow the output, roll back with it, and one more needs no change of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engine_torch_support import VOCAB, Driver, output
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import SamplingParams
from paceline.engine.processors import PROCESSORS, Chain, Processor
from paceline.engine.runner import TorchRunner
from paceline.engine.sampler import Sampler
from paceline.engine.step import Sequence as EngineSequence
from paceline.engine.step import StepItem

SMALL = 12


class Alternating:
    """A grammar: even and odd ids take turns. Counts how often it was rolled back."""

    rolled_back = 0

    def __init__(self) -> None:
        self._output: list[int] = []

    def accept(self, token_id: int) -> None:
        self._output.append(token_id)

    def rollback(self, count: int) -> None:
        Alternating.rolled_back += count
        del self._output[len(self._output) - count :]

    def apply(self, row: torch.Tensor) -> None:
        if self._output:
            row[self._output[-1] % 2 :: 2] = -math.inf


def grammar(sequence: EngineSequence) -> Processor | None:
    return Alternating() if sequence.params.temperature else None


def sequence_of(params: SamplingParams, tokens: Sequence[int], prompt_tokens: int) -> EngineSequence:
    return EngineSequence(
        id=1,
        tokens=list(tokens),
        prompt_tokens=prompt_tokens,
        params=params,
        noise_key=3,
        stop_ids=frozenset({0}),
        computed=len(tokens) - 1,
    )


def item_of(sequence: EngineSequence, draft: Sequence[int]) -> StepItem:
    start = len(sequence.tokens) - 1
    return StepItem(sequence, start, (sequence.tokens[-1], *draft), tuple(draft), len(draft) + 1)


def penalized(params: SamplingParams, logits: list[float], prompt: list[int], out: list[int]) -> list[float]:
    """vLLM's rules for one position, in plain Python."""
    row = list(logits)
    if len(out) < params.min_tokens:
        row[0] = -math.inf
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    for token_id in {*prompt, *out}:
        factor = params.repetition_penalty
        row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
    for token_id in set(out):
        row[token_id] -= params.frequency_penalty * out.count(token_id) + params.presence_penalty
    return row


TOKENS = st.lists(st.integers(0, SMALL - 1), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, SMALL - 1), min_size=1, max_size=5),
    rounds=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5),
    params=st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        frequency_penalty=st.sampled_from([0.0, -0.5, 0.75]),
        presence_penalty=st.sampled_from([0.0, 1.5]),
        min_tokens=st.integers(0, 6),
        logit_bias=st.sampled_from([{}, {0: 2.0, 5: -100.0}]),
    ),
)
def test_state_is_that_of_the_committed_output(
    prompt: list[int], rounds: list[tuple[list[int], list[int]]], params: SamplingParams
) -> None:
    """Each round drafts some tokens and commits others: state must be as if only those had ever been seen."""
    sequence = sequence_of(params, prompt, len(prompt))
    chain = Chain(sequence, PROCESSORS)
    logits = [math.sin(3.0 * v) * 4.0 for v in range(SMALL)]
    for draft, committed in rounds:
        rows = torch.tensor([logits] * (len(draft) + 1))
        chain.apply(item_of(sequence, draft), rows)
        out = sequence.tokens[len(prompt) :]
        for j, row in enumerate(rows):
            expected = penalized(params, logits, prompt, [*out, *draft[:j]])
            assert row.tolist() == pytest.approx(expected, abs=1e-5)
        sequence.tokens += committed


def test_order_is_mask_bias_penalties() -> None:
    """A bias of 4 on a seen id of logit 4, repetition 2: (4 + 4) / 2, not 4 / 2 + 4; a mask stays a mask."""
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 4.0, 0: 50.0}, min_tokens=3)
    sequence = sequence_of(params, [1], 1)
    row = torch.tensor([[9.0, 4.0, 1.0]])
    Chain(sequence, PROCESSORS).apply(item_of(sequence, ()), row)
    assert row.tolist() == [[-math.inf, 4.0, 1.0]]


def test_no_parameters_no_processors() -> None:
    assert not Chain(sequence_of(SamplingParams(), [1], 1), PROCESSORS)


def test_a_grammar_needs_no_change_of_the_engine(tiny: Callable[[str], Path], monkeypatch: Any) -> None:
    """Right and wrong drafts through the real runner: the grammar holds, and drafts change no byte."""
    runner = TorchRunner(tiny("qwen3"), dtype="float32", device="cpu", kv_cache_tokens=512)
    monkeypatch.setattr(
        runner, "_sampler", Sampler(VOCAB, torch.device("cpu"), processors=(grammar, *PROCESSORS))
    )
    params = SamplingParams(temperature=0.9, frequency_penalty=0.3)
    driver = Driver(runner)
    prompt = list(range(20, 40))
    plain = driver.add(prompt, params, noise_key=8)
    while len(output(plain)) < 24:
        driver.step([plain])
    Alternating.rolled_back = 0
    random = Random(3)
    drafted = driver.add(prompt, params, noise_key=8)
    steps = 0
    while len(output(drafted)) < 24:
        done = len(output(drafted))
        draft = output(plain)[done : done + 5][: 24 - done - 1]
        if draft and random.random() < 0.5:
            draft[random.randrange(len(draft))] = random.randrange(VOCAB)
        driver.step([drafted], {drafted.id: draft})
        steps += 1
    assert output(drafted) == output(plain)
    assert all(a % 2 != b % 2 for a, b in zip(output(plain), output(plain)[1:], strict=False))
    assert Alternating.rolled_back > 0
    assert steps < 24


def test_state_survives_preemption_and_other_sequences(tiny: Callable[[str], Path]) -> None:
    """Computing a sequence again from the start, as after a preemption, does not count its tokens twice."""
    runner = TorchRunner(tiny("qwen2"), dtype="float32", device="cpu", kv_cache_tokens=1024)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.2)
    driver = Driver(runner)
    prompt = [5, 6, 7, 8] * 4
    plain, other = driver.add(prompt, params), driver.add(prompt, params)
    again = driver.add(prompt, params)
    for _ in range(16):
        driver.step([plain, other])
    for step in range(16):
        driver.step([again])
        if step % 5 == 4:
            again.computed = 0
    assert output(again) == output(plain) == output(other)
