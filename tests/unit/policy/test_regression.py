"""Step-time regression on synthetic steps whose coefficients are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.core.types import StepRecord
from paceline.policy.regression import StepTimes

TRUTH = (0.012, 0.0004, 0.0006, 2e-7, 0.0003)


def seconds(step: tuple[int, int, int, int], truth: tuple[float, ...] = TRUTH) -> float:
    sequences, query_tokens, prefill_tokens, query_context = step
    base, sequence, token, context, prefill = truth
    decode = query_tokens - prefill_tokens
    return base + sequence * sequences + token * decode + context * query_context + prefill * prefill_tokens


def mixed(rng: random.Random) -> tuple[int, int, int, int]:
    """Decode at k 0..6 of 1..16 sequences, one step in four with a prefill chunk beside it."""
    sequences, k, context = rng.randint(1, 16), rng.randint(0, 6), rng.randint(50, 2000)
    decode = sequences * (k + 1)
    chunk = rng.choice([0, 0, 0, rng.randint(32, 256)])
    return sequences + bool(chunk), decode + chunk, chunk, decode * context + chunk * chunk


def dithered(rng: random.Random) -> tuple[int, int, int, int]:
    """k 4, dithered by one on 2% of steps, at a nearly constant batch and context."""
    sequences = rng.randint(6, 10)
    k = rng.choice([3, 5]) if rng.random() < 0.02 else 4
    decode = sequences * (k + 1)
    return sequences, decode, 0, decode * rng.randint(300, 400)


def constant(_: random.Random) -> tuple[int, int, int, int]:
    return 1, 1, 0, 300


def steps(
    make: Callable[[random.Random], tuple[int, int, int, int]],
    count: int,
    seed: int,
    *,
    noise: float = 0.05,
    outliers: float = 0.0,
    factor: float = 1.0,
) -> list[StepRecord]:
    rng = random.Random(seed)
    records = []
    for _ in range(count):
        step = make(rng)
        taken = factor * seconds(step) * max(0.1, rng.gauss(1.0, noise))
        if rng.random() < outliers:
            taken *= 10.0
        records.append(StepRecord(*step, taken))
    return records


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_recovers_known_coefficients(seed: int, outliers: float) -> None:
    times = StepTimes()
    times.add(steps(mixed, 1000, seed, outliers=outliers), now_s=0.0)
    terms = times.terms(0.0)
    assert terms is not None
    # 1000 records with 5% noise: the errors of the small terms stay within a sixth, of the large within 5%.
    assert terms.base_s == pytest.approx(TRUTH[0], rel=0.08)
    assert terms.token_s == pytest.approx(TRUTH[2], rel=0.17)
    assert terms.query_context_s == pytest.approx(TRUTH[3], rel=0.08)
    assert terms.prefill_token_s == pytest.approx(TRUTH[4], rel=0.08)
    for k in (0, 3, 6):
        expected = seconds((8, 8 * (k + 1), 0, 8 * (k + 1) * 500))
        assert terms.decode_s(8, k, 500.0) == pytest.approx(expected, rel=0.04)


def test_dithering_tells_sequences_from_tokens() -> None:
    times = StepTimes()
    times.add(steps(dithered, 1000, 1, noise=0.02), now_s=0.0)
    terms = times.terms(0.0)
    assert terms is not None
    for k in (2, 4, 6):
        expected = seconds((8, 8 * (k + 1), 0, 8 * (k + 1) * 350))
        assert terms.decode_s(8, k, 350.0) == pytest.approx(expected, rel=0.12)


def test_collinear_steps_are_load_independent_until_others_come() -> None:
    times = StepTimes()
    times.add(steps(constant, 200, 2), now_s=0.0)
    terms = times.terms(0.0)
    assert terms is not None
    assert terms.decode_s(1, 0, 300.0) == pytest.approx(seconds((1, 1, 0, 300)), rel=0.02)
    assert terms.base_s == pytest.approx(seconds((1, 1, 0, 300)), rel=0.02)


def test_unknown_before_enough_steps_and_refit_at_most_each_half_second() -> None:
    times = StepTimes()
    times.add(steps(mixed, 31, 0), now_s=0.0)
    assert times.terms(0.0) is None
    times.add(steps(mixed, 100, 1), now_s=0.4)
    assert times.terms(0.4) is None
    first = times.terms(0.5)
    assert first is not None
    times.add(steps(mixed, 100, 2, factor=1.5), now_s=0.6)
    assert times.terms(0.9) == first
    assert times.terms(1.0) != first
    assert times.refits == 2


def test_a_throttled_worker_shows_as_slowdown_and_recovers() -> None:
    times = StepTimes()
    for second in range(60):
        times.add(steps(mixed, 20, second), now_s=float(second))
    assert times.slowdown(60.0) == pytest.approx(1.0, abs=0.05)
    for second in range(60, 120):
        times.add(steps(mixed, 20, second, factor=3.0), now_s=float(second))
        terms = times.terms(float(second))
        if second >= 61:
            assert times.slowdown(float(second)) == pytest.approx(3.0, rel=0.1)
            assert terms is not None
            assert terms.decode_s(8, 2, 500.0) == pytest.approx(3.0 * seconds((8, 24, 0, 12_000)), rel=0.1)
    for second in range(120, 124):
        times.add(steps(mixed, 20, second), now_s=float(second))
    assert times.slowdown(125.0) == pytest.approx(1.0, abs=0.1)


def test_old_steps_leave_the_window() -> None:
    times = StepTimes(window_s=100.0)
    times.add(steps(mixed, 500, 0), now_s=0.0)
    assert times.slowdown(0.0) == pytest.approx(1.0, abs=0.05)
    times.add(steps(mixed, 500, 1, factor=2.0), now_s=101.0)
    assert times.slowdown(101.0) == pytest.approx(1.0, abs=0.05)
    terms = times.terms(101.0)
    assert terms is not None
    assert terms.decode_s(8, 2, 500.0) == pytest.approx(2.0 * seconds((8, 24, 0, 12_000)), rel=0.05)


def test_mean_context_is_that_of_decoding() -> None:
    times = StepTimes()
    assert times.context_tokens is None
    times.add([StepRecord(2, 260, 256, 300_000, 0.1), StepRecord(2, 4, 0, 800, 0.02)], now_s=0.0)
    assert times.context_tokens == 200.0
