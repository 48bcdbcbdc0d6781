"""Rejection sampling: each decision against the textbook rule in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.noise import exponentials, noise_bits, uniform
from paceline.core.types import DraftDistribution, SamplingParams
from paceline.engine.sampler import Sampler
from paceline.engine.step import RejectionKeys, Sequence, StepItem

V = 40
CPU = torch.device("cpu")


def sequence_of(params: SamplingParams, **changes: Any) -> Sequence:
    return Sequence(1, [1, 2, 3], 2, params, noise_key=77, computed=2, **changes)


def softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def random_q(generator: np.random.Generator, size: int) -> DraftDistribution:
    ids = generator.choice(V, size=size, replace=False)
    probs = softmax(generator.normal(size=size) * 1.5)
    return DraftDistribution(tuple(int(v) for v in ids), tuple(float(p) for p in probs))


def expected_token(
    p: np.ndarray[Any, Any], x: int, q: DraftDistribution | None, keys: RejectionKeys, position: int
) -> int:
    dense = np.zeros(V)
    if q is None:
        dense[x] = 1.0
    else:
        dense[list(q.token_ids)] = q.probs
    if uniform(keys.accept, position, 0) < min(1.0, p[x] / dense[x]):
        return x
    residual = np.maximum(p - dense, 0.0)
    residual /= residual.sum()
    noise = exponentials(noise_bits(keys.residual, position, np.arange(V)))
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(residual) - np.log(noise)))


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_k=6)]
)
def test_decisions_equal_the_rule(point_mass: bool, params: SamplingParams) -> None:
    generator = np.random.default_rng(5)
    accepted = rejected = 0
    for trial in range(150):
        keys = RejectionKeys(accept=trial * 31 + 1, residual=trial * 37 + 2)
        logits = (generator.normal(size=(4, V)) * 2).astype(np.float32)
        qs = [random_q(generator, 5) for _ in range(3)]
        draft = [int(generator.choice(q.token_ids, p=q.probs)) for q in qs]
        if trial % 3 == 0:
            draft = [int(row.argmax()) for row in logits[:3]]
            qs = [DraftDistribution((x, (x + 1) % V), (0.75, 0.25)) for x in draft]
        item = StepItem(
            sequence_of(params, rejection=keys),
            2,
            (3, *draft),
            tuple(draft),
            4,
            () if point_mass else tuple(qs),
        )
        (result,) = Sampler(V, CPU).choose([item], torch.tensor(logits))
        for j in range(3):
            scaled = logits[j].astype(np.float64) / params.temperature
            if params.top_k:
                scaled[scaled < np.sort(scaled)[-params.top_k]] = -np.inf
            wanted = expected_token(softmax(scaled), draft[j], None if point_mass else qs[j], keys, 1 + j)
            assert result.chosen[j] == wanted
            accepted += wanted == draft[j]
            rejected += wanted != draft[j]
        assert result.margins == []
    assert accepted > 50
    assert rejected > 50


def test_bonus_and_plain_positions_race_with_the_target_key() -> None:
    generator = np.random.default_rng(6)
    logits = (generator.normal(size=(3, V)) * 2).astype(np.float32)
    params = SamplingParams(temperature=0.9)
    item = StepItem(sequence_of(params, rejection=RejectionKeys(1, 2)), 2, (3, 4, 5), (4, 5), 3)
    plain = StepItem(sequence_of(params), 2, (3, 4, 5), (4, 5), 3)
    (rejection,) = Sampler(V, CPU).choose([item], torch.tensor(logits))
    (coupled,) = Sampler(V, CPU).choose([plain], torch.tensor(logits))
    assert rejection.chosen[2] == coupled.chosen[2]


def test_a_draft_token_is_drawn_from_what_is_reported() -> None:
    """The 5 likeliest of the row, renormalized: probabilities and winners by hand."""
    generator = np.random.default_rng(7)
    count, m, temperature = 200, 5, 0.8
    logits = (generator.normal(size=(count, V)) * 2).astype(np.float32)
    items = []
    for i in range(count):
        sequence = sequence_of(SamplingParams(temperature=temperature, top_p=0.999), truncate_to=m)
        sequence.noise_key = i
        items.append(StepItem(sequence, 2, (3,), (), 1))
    results = Sampler(V, CPU).choose(items, torch.tensor(logits))
    for i, result in enumerate(results):
        ids = np.argsort(-logits[i])[:m]
        q = softmax(logits[i][ids].astype(np.float64) / temperature)
        assert result.distributions is not None
        (reported,) = result.distributions
        assert reported.token_ids == tuple(ids.tolist())
        assert reported.probs == pytest.approx(q, abs=1e-6)
        noise = exponentials(noise_bits(i, 1, ids))
        assert result.chosen == [int(ids[np.argmax(np.log(q) - np.log(noise))])]


def test_greedy_is_the_argmax_in_both_modes() -> None:
    logits = torch.randn((3, V), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.0)
    sequence = sequence_of(params, rejection=RejectionKeys(1, 2))
    item = StepItem(sequence, 2, (3, 4, 5), (4, 5), 3, (DraftDistribution((4,), (1.0,)),) * 2)
    (result,) = Sampler(V, CPU).choose([item], logits.clone())
    assert result.chosen == logits.argmax(1).tolist()
    drafter = StepItem(sequence_of(params, truncate_to=8), 2, (3,), (), 1)
    (drawn,) = Sampler(V, CPU).choose([drafter], logits[:1].clone())
    assert (drawn.chosen, drawn.distributions) == (logits[:1].argmax(1).tolist(), None)


def test_equal_distributions_always_accept() -> None:
    """p equals q up to rounding: nothing is left of the residual, and the draft token stands."""
    params = SamplingParams(temperature=1.0, top_k=3)
    logits = torch.full((1, V), -5.0)
    logits[0, :3] = torch.tensor([1.0, 0.5, 0.1])
    probs = logits[0, :3].double().softmax(0).tolist()
    for trial in range(300):
        keys = RejectionKeys(trial, trial + 1)
        q = DraftDistribution((0, 1, 2), tuple(probs))
        item = StepItem(sequence_of(params, rejection=keys), 2, (3, trial % 3), (trial % 3,), 2, (q,))
        (result,) = Sampler(V, CPU).choose([item], logits.repeat(2, 1))
        assert result.chosen[0] == trial % 3
