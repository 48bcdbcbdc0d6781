"""Pair estimates against simulated rounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.policy.estimates import DecayedShare, PairEstimates, RoundCounts, conditional_trials


def simulate(alpha: float, lengths: list[int], rounds: int, seed: int) -> RoundCounts:
    """Geometric acceptance: each token survives with probability alpha given those before."""
    rng = random.Random(seed)
    verified, accepted = [0] * max(lengths), [0] * max(lengths)
    for _ in range(rounds):
        k = rng.choice(lengths)
        alive = True
        for position in range(k):
            verified[position] += 1
            alive = alive and rng.random() < alpha
            accepted[position] += alive
    return RoundCounts(
        rounds=rounds, verified_by_position=tuple(verified), accepted_by_position=tuple(accepted)
    )


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("lengths", [[4], [1, 2], [2, 4, 8]])
def test_alpha_of_geometric_acceptance(alpha: float, lengths: list[int]) -> None:
    pair = PairEstimates()
    pair.add(simulate(alpha, lengths, 5000, 3), 0.0)
    # At least 5000 trials: four standard errors are below 0.03.
    assert pair.alpha == pytest.approx(alpha, abs=0.03)


def test_trials_are_accepted_plus_first_rejections_at_one_length() -> None:
    # Ten rounds of 3: six pass the first, four the second, one all: 6 + 4 + 1 accepted, 9 rejections.
    assert conditional_trials((10, 10, 10), (6, 4, 1)) == pytest.approx(11 + 9)
    assert conditional_trials((), ()) == 0.0
    assert conditional_trials((5, 5), (0, 0)) == 5.0


def test_alpha_follows_a_change_and_stays_without_traffic() -> None:
    pair = PairEstimates()
    assert pair.alpha is None
    for i in range(100):
        pair.add(simulate(0.9, [4], 50, i), i * 0.1)
    assert pair.alpha == pytest.approx(0.9, abs=0.03)
    for i in range(200):
        pair.add(simulate(0.4, [4], 50, i), 10.0 + i * 0.1)
    assert pair.alpha == pytest.approx(0.4, abs=0.04)
    pair.add(RoundCounts(), 1e6)
    assert pair.alpha == pytest.approx(0.4, abs=0.04)


def test_undrafted_share() -> None:
    pair = PairEstimates()
    assert pair.undrafted_share == 0.0
    for _ in range(50):
        pair.add(RoundCounts(rounds=40, undrafted_rounds=10), 0.0)
    assert pair.undrafted_share == pytest.approx(0.25)


def timed(rng: random.Random, length: int, proposals: int = 20) -> RoundCounts:
    """1 ms round trip, 0.5 ms queue, 2 ms a token, 1% noise on the elapsed time."""
    hold_s = proposals * (0.0005 + 0.002 * length)
    return RoundCounts(
        arrived_tokens=proposals * length,
        proposals=proposals,
        elapsed_s=(hold_s + proposals * 0.001) * rng.gauss(1.0, 0.01),
        hold_s=hold_s,
        queue_s=proposals * 0.0005,
        compute_s=proposals * 0.002 * length,
    )


@pytest.mark.parametrize("lengths", [[4], [1, 2], [2, 4, 6]])
def test_proposal_times(lengths: list[int]) -> None:
    rng = random.Random(1)
    pair = PairEstimates()
    assert pair.timing is None
    for _ in range(64):
        pair.add(timed(rng, rng.choice(lengths)), 0.0)
    timing = pair.timing
    assert timing is not None
    assert timing.base_s == pytest.approx(0.0015, abs=0.0003)
    assert timing.token_s == pytest.approx(0.002, rel=0.05)
    assert timing.round_trip_s == pytest.approx(0.001, abs=0.0002)
    assert timing.queue_s == pytest.approx(0.0005)


def test_scarce_evidence_replaces_old_but_does_not_upset_it() -> None:
    share = DecayedShare(memory=2000.0, memory_s=10.0, floor=100.0)
    share.add(900, 1000, now_s=0.0)
    # A minute later one count against it: 99 of the old ones still stand beside it.
    share.add(0, 1, now_s=60.0)
    assert share.share == pytest.approx(0.9 * 99 / 100)
    share.add(0, 100, now_s=120.0)
    assert share.share == pytest.approx(0.0, abs=0.01)


def test_drafters_without_compute_times_are_read_by_their_hold() -> None:
    pair = PairEstimates()
    counts = timed(random.Random(1), 4)
    pair.add(replace(counts, compute_s=0.0), 0.0)
    timing = pair.timing
    assert timing is not None
    assert timing.token_s == pytest.approx(0.002, rel=0.05)
