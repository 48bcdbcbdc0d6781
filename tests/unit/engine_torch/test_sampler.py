"""Processors, truncation and the race against plain numpy forms written from vLLM's rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_torch_support import GREEDY
from numpy.typing import NDArray
from scipy.stats import chisquare

from paceline.core.noise import exponentials, noise_bits
from paceline.core.types import SamplingParams
from paceline.engine.processors import PROCESSORS, Chain
from paceline.engine.race import MAX_MARGIN
from paceline.engine.sampler import Sampler
from paceline.engine.step import ItemResult, StepItem
from paceline.engine.step import Sequence as EngineSequence
from paceline.engine.truncation import kept_ids

CPU = torch.device("cpu")
Floats = NDArray[np.float64]


def make_item(
    params: SamplingParams,
    tokens: Sequence[int] = (1, 2, 3),
    prompt_tokens: int = 3,
    draft: Sequence[int] = (),
    noise_key: int = 5,
    stop_ids: frozenset[int] = frozenset(),
) -> StepItem:
    sequence = EngineSequence(
        id=1,
        tokens=list(tokens),
        prompt_tokens=prompt_tokens,
        params=params,
        noise_key=noise_key,
        stop_ids=stop_ids,
        computed=len(tokens) - 1,
    )
    return StepItem(sequence, len(tokens) - 1, (tokens[-1], *draft), tuple(draft), len(draft) + 1)


def choose(item: StepItem, logits: Floats) -> ItemResult:
    rows = torch.tensor(logits, dtype=torch.float32).reshape(item.samples, -1)
    (result,) = Sampler(rows.shape[1], CPU).choose([item], rows)
    return result


def adjust(item: StepItem, rows: torch.Tensor) -> None:
    Chain(item.sequence, PROCESSORS).apply(item, rows)


def brute_keep(logits: Floats, params: SamplingParams) -> set[int]:
    """vLLM's rules one after the other on sorted probabilities."""
    x = logits.astype(np.float64).copy()

    def probabilities() -> Floats:
        e = np.exp(x - x.max())
        return np.asarray(e / e.sum())

    if params.min_p > 0:
        p = probabilities()
        x[p < params.min_p * p.max()] = -np.inf
    if params.top_k > 0:
        kth = np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
        x[x < kth] = -np.inf
    if params.top_p < 1:
        p = probabilities()
        mass = 0.0
        keep = np.zeros(len(x), dtype=bool)
        for i in sorted(range(len(x)), key=lambda i: (-x[i], i)):
            if mass >= params.top_p:
                break
            keep[i] = True
            mass += p[i]
        x[~keep] = -np.inf
    return set(np.flatnonzero(np.isfinite(x)).tolist())


@pytest.mark.parametrize("vocab_size", [50, 700, 6000])
@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 400},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.99},
        {"top_k": 30, "top_p": 0.8},
        {"top_k": 30, "min_p": 0.2},
        {"min_p": 0.01, "top_p": 0.95},
        {"top_k": 20, "top_p": 0.6, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_truncation_equals_brute_force(vocab_size: int, changes: dict[str, Any], spread: float) -> None:
    generator = np.random.default_rng(vocab_size)
    params = replace(SamplingParams(), **changes)
    for _ in range(3):
        logits = (generator.normal(size=vocab_size) * spread).astype(np.float32)
        kept = kept_ids(torch.from_numpy(logits), params)
        expected = brute_keep(logits.astype(np.float64), params)
        if kept is None:
            assert expected == set(range(vocab_size))
        else:
            assert kept.tolist() == sorted(expected)


def test_ties_are_kept_by_top_k_and_split_by_lowest_id_by_top_p() -> None:
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    for params, expected in (
        (SamplingParams(top_k=2), [1, 2, 3]),
        (SamplingParams(top_p=0.5), [1, 2]),
        (SamplingParams(top_p=0.01), [1]),
    ):
        kept = kept_ids(row, params)
        assert kept is not None
        assert kept.tolist() == expected


def test_race_equals_brute_force() -> None:
    generator = np.random.default_rng(3)
    for trial in range(60):
        params = SamplingParams(
            temperature=float(generator.uniform(0.2, 2.0)),
            top_p=[1.0, 0.9, 0.5][trial % 3],
            top_k=[0, 20][trial % 2],
            min_p=[0.0, 0.0, 0.03, 0.0][trial % 4],
        )
        draft = tuple(int(t) for t in generator.integers(0, 300, size=trial % 4))
        tokens = [1, 2, 3, *range(trial % 5)]
        item = make_item(params, tokens=tokens, draft=draft, noise_key=trial * 7919)
        logits = (generator.normal(size=(item.samples, 300)) * 3).astype(np.float32)
        result = choose(item, logits)
        for j in range(item.samples):
            scaled = logits[j].astype(np.float64) / params.temperature
            kept = np.asarray(sorted(brute_keep(scaled, params)))
            log_p = scaled[kept] - math.log(np.exp(scaled[kept]).sum())
            noise = exponentials(noise_bits(trial * 7919, len(tokens) - 3 + j, kept))
            race = log_p - np.log(noise)
            assert result.chosen[j] == kept[race.argmax()]
            if len(kept) > 1:
                first, second = np.sort(race)[::-1][:2]
                assert result.margins[j] == pytest.approx(first - second, abs=1e-4)
            else:
                assert result.margins[j] == MAX_MARGIN


def test_coupled_race_samples_the_softmax() -> None:
    """Chi-square over 20000 keys: tokens follow softmax(logits / T)."""
    logits = np.asarray([0.3, 1.9, -0.7, 1.0, 0.1, -2.0, 0.9, 1.4])
    temperature, count = 0.8, 20_000
    sampler = Sampler(8, CPU)
    items = [
        make_item(SamplingParams(temperature=temperature), noise_key=key * 1_000_003) for key in range(count)
    ]
    results = sampler.choose(items, torch.tensor(logits, dtype=torch.float32).repeat(count, 1))
    observed = np.bincount([r.chosen[0] for r in results], minlength=8)
    weights = np.exp(logits / temperature)
    assert chisquare(observed, count * weights / weights.sum()).pvalue > 1e-3


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    result = choose(make_item(GREEDY), np.asarray([0.0, 4.0, 4.0, 1.0]))
    assert (result.chosen, result.margins) == ([1], [0.0])
    result = choose(
        make_item(replace(GREEDY, repetition_penalty=1.0001)), np.asarray([5.0, 1.0, 0.0, 0.0, 5.0])
    )
    assert result.chosen == [0]


def test_penalties_by_hand() -> None:
    """Prompt 1 2; output 3 3; drafts 4 then 3. Repetition counts all, frequency and presence output only."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5
    )
    item = make_item(params, tokens=[1, 2, 3, 3], prompt_tokens=2, draft=[4, 3])
    rows = torch.tensor([[8.0, 8.0, -8.0, 8.0, 8.0, -8.0]] * 3)
    adjust(item, rows)
    # Id 1 (prompt): 8/2. Id 2 (prompt, negative): -8*2. Id 3 (output twice): 8/2 - 0.25*2 - 0.5.
    assert rows[0].tolist() == [8.0, 4.0, -16.0, 3.0, 8.0, -8.0]
    # Draft 4 counts from the next position on: 8/2 - 0.25 - 0.5.
    assert rows[1].tolist() == [8.0, 4.0, -16.0, 3.0, 3.25, -8.0]
    # Draft 3 makes it three times: 8/2 - 0.25*3 - 0.5.
    assert rows[2].tolist() == [8.0, 4.0, -16.0, 2.75, 3.25, -8.0]


def test_min_tokens_masks_stop_ids_until_enough_are_committed() -> None:
    """Two of four committed, two drafts: positions 2 and 3 are masked, position 4 is not."""
    params = SamplingParams(temperature=0.0, min_tokens=4, logit_bias={0: 100.0, 2: 1.5})
    item = make_item(params, tokens=[1, 2, 3, 3, 3], prompt_tokens=3, draft=[1, 1], stop_ids=frozenset({0}))
    rows = torch.zeros((3, 4))
    adjust(item, rows)
    assert rows[:, 0].tolist() == [-math.inf, -math.inf, 100.0]
    assert rows[:, 2].tolist() == [1.5] * 3
    sampler = Sampler(4, CPU)
    (result,) = sampler.choose([item], torch.zeros((3, 4)))
    assert result.chosen == [2, 2, 0]


def test_logprobs_ignore_processors_and_sampled_rows_have_them() -> None:
    params = SamplingParams(temperature=0.5, logprobs=2, top_k=1, logit_bias={2: 100.0})
    logits = np.asarray([1.0, 3.0, 0.0, 2.0])
    result = choose(make_item(params), logits)
    expected = logits - math.log(np.exp(logits).sum())
    assert result.chosen == [2]
    assert result.logprobs is not None
    assert result.logprobs[0].logprob == pytest.approx(expected[2], abs=1e-6)
    assert [token_id for token_id, _ in result.logprobs[0].top] == [1, 3]
    zero = choose(make_item(replace(params, logprobs=0)), logits).logprobs
    assert zero is not None
    assert zero[0].top == ()


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 2.0], [-math.inf] * 3, [math.inf, 0.0, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_own_item(bad: list[float], temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    items = [make_item(params), make_item(params, draft=[1]), make_item(params)]
    rows = torch.tensor([[0.0, 9e3, 1.0], [0.0, 1.0, 0.0], bad, [9e3, 0.0, 1.0]])
    first, second, third = Sampler(3, CPU).choose(items, rows)
    assert (first.chosen, third.chosen) == ([1], [0])
    assert first.error is None
    assert second.error is not None
    assert second.chosen == []
