"""The policy in a loop with a simulated verifier and drafter: it finds and follows what pays."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from paceline.core.types import StepRecord, WorkerRole, WorkerState
from paceline.policy.estimates import RoundCounts
from paceline.policy.fleet import Fleet
from paceline.policy.planner import Control
from paceline.policy.reports import Report

REPORT_S = 0.1


@dataclass
class Station:
    """A verifier at a constant batch: 20 ms a step and ``token_s`` a token; 1 ms + 2 ms a draft token."""

    alpha: float
    running: int
    token_s: float
    slowdown: float = 1.0
    now_s: float = 0.0
    number: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = Fleet(Control(), clock=lambda: self.now_s)

    def run(self, seconds: float) -> list[int]:
        """Reports each 100 ms; the planned draft lengths."""
        start = len(self.lengths)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            plans = self.fleet.plans_for("v0")
            self._interval(plans[0].draft_tokens if plans else 4)
            self.fleet.replan()
            self.lengths.append(self.fleet.plans_for("v0")[0].draft_tokens)
        return self.lengths[start:]

    def _interval(self, planned: int) -> None:
        steps: list[StepRecord] = []
        verified, accepted = [0] * 16, [0] * 16
        rounds = tokens = 0
        elapsed_s = 0.0
        interval_s = 0.0
        while interval_s < REPORT_S:
            k = planned
            if k and self.rng.random() < 0.02:
                k += self.rng.choice([-1, 1])
            query = self.running * (k + 1)
            noise = self.slowdown * self.rng.gauss(1.0, 0.03)
            seconds = (0.02 + self.token_s * query) * noise
            steps.append(StepRecord(self.running, query, 0, query * self.rng.randint(100, 300), seconds))
            interval_s += seconds + (0.001 + 0.002 * k if k else 0.0)
            for _ in range(self.running if k else 0):
                rounds, tokens, elapsed_s = rounds + 1, tokens + k, elapsed_s + 0.001 + 0.002 * k
                alive = True
                for position in range(k):
                    verified[position] += 1
                    alive = alive and self.rng.random() < self.alpha
                    accepted[position] += alive
        counts = RoundCounts(
            rounds, 0, tuple(verified), tuple(accepted), tokens, rounds, elapsed_s, elapsed_s - 0.001 * rounds
        )
        drafts = (("d0", counts),)
        self.now_s += interval_s
        self.number += 1
        report = Report(
            "v0", WorkerRole.VERIFIER, WorkerState.READY, 1, 1, self.number, self.running, 0, 0, 0, 64,
            tuple(steps), drafts, (),
        )  # fmt: skip
        self.fleet.observe(report, self)

    def tpot_s(self, k: int) -> float:
        """True mean time a token."""
        step_s = (0.02 + self.token_s * self.running * (k + 1)) * self.slowdown
        return (step_s + (0.001 + 0.002 * k if k else 0.0)) / sum(self.alpha**i for i in range(k + 1))


@pytest.mark.parametrize(
    ("alpha", "running", "token_s"),
    [(0.9, 1, 0.0), (0.7, 4, 0.001), (0.7, 16, 0.001), (0.5, 4, 0.004), (0.8, 32, 0.002)],
)
def test_settles_within_three_per_cent_of_the_best(alpha: float, running: int, token_s: float) -> None:
    station = Station(alpha, running, token_s)
    station.run(10.0)
    usual, count = Counter(lengths := station.run(20.0)).most_common(1)[0]
    best_s = min(station.tpot_s(k) for k in range(9))
    assert station.tpot_s(usual) <= 1.03 * best_s
    assert count > 0.5 * len(lengths)


def test_drafting_stops_when_acceptance_falls_and_returns_by_probing() -> None:
    station = Station(0.8, 8, 0.002)
    assert min(station.run(20.0)[-20:]) > 0
    station.alpha = 0.1
    station.run(10.0)
    stopped = station.run(10.0)
    assert stopped.count(0) > 0.85 * len(stopped)
    station.alpha = 0.9
    station.run(25.0)
    assert min(station.run(5.0)) > 0


def test_a_slower_machine_is_seen_within_seconds() -> None:
    station = Station(0.7, 4, 0.001)
    station.run(20.0)
    station.slowdown = 4.0
    station.run(4.0)
    assert station.fleet.statuses()[0].slowdown_observed == pytest.approx(4.0, rel=0.1)
