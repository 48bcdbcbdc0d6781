"""The worker table, routing weights and predictions, on an injected clock."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.types import StepRecord, WorkerRole, WorkerState
from paceline.policy.estimates import RoundCounts
from paceline.policy.fleet import Fleet
from paceline.policy.planner import Control
from paceline.policy.reports import FinishedRequest, Report

LINK = object()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def steps(base_s: float) -> tuple[StepRecord, ...]:
    """Noise-free steps of base + 1 ms a token, a prefill chunk of 100 tokens (0.2 ms each) in every fifth."""
    records = []
    for i in range(100):
        sequences, k = 1 + i % 8, i % 5
        tokens, chunk = sequences * (k + 1), 100 * (i % 5 == 0)
        seconds = base_s + 0.001 * tokens + 0.0002 * chunk
        records.append(
            StepRecord(sequences + bool(chunk), tokens + chunk, chunk, (tokens + chunk) * 100, seconds)
        )
    return tuple(records)


def rounds(accepted: int) -> RoundCounts:
    """100 rounds of one draft token, ``accepted`` of them accepted; 1 ms there and back, 1 ms compute."""
    return RoundCounts(100, 0, (100,), (accepted,), 100, 100, 0.2, 0.1, 0.0, 0.1)


def report(
    worker_id: str = "v0",
    number: int = 1,
    *,
    role: WorkerRole = WorkerRole.VERIFIER,
    state: WorkerState = WorkerState.READY,
    incarnation: int = 1,
    running: int = 1,
    waiting: int = 0,
    base_s: float | None = None,
    accepted: int | None = None,
    drafter: str = "d0",
    requests: tuple[FinishedRequest, ...] = (),
) -> Report:
    return Report(
        worker_id,
        role,
        state,
        incarnation,
        42,
        number,
        running,
        waiting,
        running,
        7,
        8,
        steps(base_s) if base_s is not None else (),
        ((drafter, rounds(accepted)),) if accepted is not None else (),
        requests,
    )


def states(fleet: Fleet) -> dict[str, WorkerState]:
    return {worker.id: worker.state for worker in fleet.statuses()}


def weights(fleet: Fleet) -> dict[tuple[str, str], float]:
    return {(pair.verifier_id, pair.drafter_id): pair.weight for pair in fleet.pairs}


def test_silence_and_stream_end_lose_a_worker_and_a_report_brings_it_back() -> None:
    clock = Clock()
    fleet = Fleet(Control(), clock=clock)
    assert fleet.observe(report(), LINK)
    clock.now_s += 3.0
    assert states(fleet) == {"v0": WorkerState.READY}
    clock.now_s += 0.1
    assert states(fleet) == {"v0": WorkerState.LOST}
    fleet.observe(report(number=2), LINK)
    assert states(fleet) == {"v0": WorkerState.READY}
    fleet.stream_ended(object())
    assert states(fleet) == {"v0": WorkerState.READY}
    fleet.stream_ended(LINK)
    assert states(fleet) == {"v0": WorkerState.LOST}
    fleet.observe(report(number=3), object())
    assert states(fleet) == {"v0": WorkerState.READY}
    fleet.stream_ended(LINK)
    assert states(fleet) == {"v0": WorkerState.READY}


def test_lost_workers_leave_the_table_in_the_end() -> None:
    clock = Clock()
    fleet = Fleet(Control(), clock=clock)
    fleet.observe(report(accepted=80), LINK)
    fleet.replan()
    clock.now_s += 601.0
    fleet.replan()
    assert states(fleet) == {}
    assert fleet.pairs == ()


def test_old_numbers_and_old_processes_are_ignored() -> None:
    fleet = Fleet(Control(), clock=Clock())
    fleet.observe(report(number=5, accepted=80), LINK)
    assert not fleet.observe(report(number=5, accepted=10), LINK)
    assert not fleet.observe(report(number=4), LINK)
    assert fleet.observe(report(number=1, incarnation=2), LINK)
    assert not fleet.observe(report(number=6, incarnation=1), LINK)
    assert fleet.ignored == Counter(out_of_order=2, stale_incarnation=1)
    # The new process starts without the old one's measurements.
    assert fleet.statuses()[0].alpha is None


def test_weights_are_inverse_to_predicted_tpot_and_zero_for_the_unusable() -> None:
    clock = Clock()
    fleet = Fleet(Control(fixed_tokens=0), clock=clock)
    fleet.observe(report("fast", base_s=0.01, accepted=80), LINK)
    fleet.observe(report("slow", base_s=0.03, accepted=80), LINK)
    fleet.observe(report("d0", role=WorkerRole.DRAFTER), LINK)
    fleet.replan()
    # One running sequence: 11 ms and 31 ms a token.
    assert weights(fleet) == pytest.approx({("fast", "d0"): 31 / 42, ("slow", "d0"): 11 / 42}, rel=0.02)
    fleet.observe(report("fast", 2, state=WorkerState.DRAINING), LINK)
    fleet.replan()
    assert weights(fleet) == {("fast", "d0"): 0.0, ("slow", "d0"): 1.0}
    fleet.observe(report("d0", 2, role=WorkerRole.DRAFTER, state=WorkerState.DRAINING), LINK)
    fleet.replan()
    assert set(weights(fleet).values()) == {0.0}


def test_unmeasured_pairs_share_alike_and_a_verifier_without_drafters_is_a_pair() -> None:
    fleet = Fleet(Control(), clock=Clock())
    fleet.observe(report("v0"), LINK)
    fleet.observe(report("v1"), LINK)
    fleet.replan()
    assert weights(fleet) == {("v0", ""): 0.5, ("v1", ""): 0.5}
    assert fleet.plans_for("v0") == ()


def test_configured_drafters_are_planned_before_they_report() -> None:
    fleet = Fleet(Control(fixed_tokens=3), clock=Clock(), drafters=["d0", "d1"])
    fleet.observe(report("v0"), LINK)
    fleet.replan()
    plans = fleet.plans_for("v0")
    assert [(plan.drafter_id, plan.draft_tokens) for plan in plans] == [("d0", 3), ("d1", 3)]
    assert set(weights(fleet).values()) == {0.0}


def test_plans_are_numbered_anew_only_when_they_change() -> None:
    clock = Clock()
    fleet = Fleet(Control(), clock=clock)
    fleet.observe(report(base_s=0.02, accepted=80), LINK)
    fleet.replan()
    first = fleet.plans_for("v0")
    clock.now_s += 0.1
    fleet.replan()
    assert fleet.plans_for("v0") == first
    assert first[0].reason == "best"
    fleet.observe(report(number=2, running=8), LINK)
    fleet.replan()
    assert fleet.plans_for("v0")[0].plan > first[0].plan
    assert fleet.plan_age_s == 0.0


def test_alpha_is_pooled_over_the_pairs_of_a_worker() -> None:
    fleet = Fleet(Control(), clock=Clock())
    fleet.observe(report("v0", accepted=90), LINK)
    fleet.observe(report("v1", accepted=50), LINK)
    fleet.observe(report("d0", role=WorkerRole.DRAFTER), LINK)
    alpha = {worker.id: worker.alpha for worker in fleet.statuses()}
    assert alpha == pytest.approx({"v0": 0.9, "v1": 0.5, "d0": 0.7})


def test_prediction_of_a_plain_request() -> None:
    fleet = Fleet(Control(enabled=False), clock=Clock())
    assert fleet.predict(100, 11) is None
    fleet.observe(report(base_s=0.02, running=0, accepted=80), LINK)
    fleet.replan()
    found = fleet.predict(100, 11)
    assert found is not None
    # Alone: one step of 20 ms with 100 tokens of 0.2 ms, then ten of 21 ms.
    assert found.ttft_s == pytest.approx(0.04, rel=0.05)
    assert found.tpot_s == pytest.approx(0.021, rel=0.02)
    assert found.e2e_s(11) == pytest.approx(0.25, rel=0.05)
    fleet.observe(report(number=2, running=8, waiting=8), LINK)
    fleet.replan()
    queued = fleet.predict(100, 11, "v0")
    assert queued is not None
    assert queued.ttft_s > found.ttft_s + found.e2e_s(11)


def test_explanation_shows_neighbours_and_break_even() -> None:
    fleet = Fleet(Control(), clock=Clock())
    fleet.observe(report(base_s=0.02, accepted=80), LINK)
    fleet.replan()
    found = fleet.explain("v0", "d0", 100, 100)
    assert len(found.tpot_s) == 9
    assert found.tpot_s[0] == pytest.approx(0.021, rel=0.02)
    assert min(range(9), key=lambda k: found.tpot_s[k]) == found.plan.draft_tokens > 0
    # Alone drafting pays; at 1 ms a token, and 4 tokens fed for each gained, it stops below saturation:
    # plain saturates at 1 / (20 ms of prompt + 100 tokens of 1 ms).
    assert found.break_even_rps is not None
    assert 0.0 < found.break_even_rps < 1 / 0.12


def test_unknown_names_are_not_found() -> None:
    fleet = Fleet(Control(), clock=Clock())
    fleet.observe(report("d0", role=WorkerRole.DRAFTER), LINK)
    for ask in (
        lambda: fleet.predict(1, 1, "v9"),
        lambda: fleet.predict(1, 1, "d0"),
        lambda: fleet.explain("v9", "d0"),
    ):
        with pytest.raises(PacelineError) as caught:
            ask()
        assert caught.value.kind is ErrorKind.NOT_FOUND


def test_finished_requests_set_the_mean_workload() -> None:
    fleet = Fleet(Control(enabled=False), clock=Clock())
    finished = tuple(FinishedRequest(1000, 50, 0.1, 1.0, "gold") for _ in range(300))
    fleet.observe(report(base_s=0.02, accepted=80, requests=finished), LINK)
    worker = fleet.workers["v0"]
    assert worker.prompt_tokens == pytest.approx(1000, rel=0.01)
    assert worker.output_tokens == pytest.approx(50, rel=0.01)
