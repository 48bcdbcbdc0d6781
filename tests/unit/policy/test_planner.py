"""The planner against brute force, and its steadiness."""

from __future__ import annotations

import random

import pytest

from paceline.core.errors import ConfigError
from paceline.core.latency import StepTerms
from paceline.policy.estimates import DraftTiming
from paceline.policy.planner import Control, PairPlanner, PairView
from paceline.wire.settings import Settings


def view(
    *,
    alpha: float = 0.8,
    running: int = 4,
    token_s: float = 0.0005,
    draft_s: float = 0.001,
    undrafted: float = 0.0,
) -> PairView:
    return PairView(
        terms=StepTerms(base_s=0.02, token_s=token_s),
        running=running,
        alpha=alpha,
        verified_tokens=1000,
        rounds=300,
        undrafted_share=undrafted,
        timing=DraftTiming(base_s=0.001, token_s=draft_s, round_trip_s=0.0005),
    )


def brute_force(
    alpha: float, running: int, token_s: float, draft_s: float, undrafted: float, k_max: int
) -> int:
    """The best k written out anew: a draft must arrive within one plain step."""
    plain_s = 0.02 + running * token_s
    costs = {0: plain_s}
    for k in range(1, k_max + 1):
        delay_s = 0.001 + k * draft_s
        if delay_s > plain_s:
            continue
        tokens = (1 - undrafted) * sum(alpha**i for i in range(k + 1)) + undrafted
        costs[k] = (0.02 + running * (k + 1) * token_s + delay_s) / tokens
    return min(costs, key=lambda k: costs[k])


@pytest.mark.parametrize("alpha", [0.12, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("running", [1, 8, 64])
@pytest.mark.parametrize("token_s", [0.0, 0.0003, 0.002])
def test_picks_the_brute_force_best(alpha: float, running: int, token_s: float) -> None:
    for draft_s in (0.0002, 0.001, 0.004):
        for undrafted in (0.0, 0.3):
            seen = view(alpha=alpha, running=running, token_s=token_s, draft_s=draft_s, undrafted=undrafted)
            plan = PairPlanner(Control()).plan(seen, 0.0)
            best = brute_force(alpha, running, token_s, draft_s, undrafted, 8)
            assert plan.draft_tokens == best
            assert plan.reason == ("best" if best else "not_paying")
            assert plan.max_wait_s == pytest.approx(0.02 + running * token_s)


def test_hysteresis_and_dwell_bound_the_switches() -> None:
    """At the break-even acceptance, with noise of 0.05 on alpha: unsteady without, at most a few with."""
    rng = random.Random(7)
    alpha_even = next(a / 1000 for a in range(1000) if brute_force(a / 1000, 8, 0.002, 0.001, 0.0, 8) > 0)
    planner = PairPlanner(Control())
    naive = steady = 0
    last_naive = last_steady = None
    for tick in range(600):
        alpha = alpha_even + rng.gauss(0.0, 0.05)
        bare = brute_force(alpha, 8, 0.002, 0.001, 0.0, 8) > 0
        plan = planner.plan(view(alpha=alpha, running=8, token_s=0.002), tick * 0.1)
        drafting = plan.reason == "best"
        naive += last_naive is not None and bare != last_naive
        steady += last_steady is not None and drafting != last_steady
        last_naive, last_steady = bare, drafting
    assert naive > 200
    assert steady <= 60 / 2  # one a dwell of 2 s


def test_turns_on_at_three_per_cent_and_off_at_none() -> None:
    def gain(alpha: float) -> float:
        plain = 0.02 + 8 * 0.002
        return (
            max(
                plain * sum(alpha**i for i in range(k + 1)) / (0.02 + 8 * (k + 1) * 0.002 + 0.001 + k * 0.001)
                for k in range(1, 9)
            )
            - 1.0
        )

    grid = [a / 1000 for a in range(1000)]
    losing = max(a for a in grid if gain(a) < -0.005)
    small = min(a for a in grid if gain(a) > 0.015)
    large = min(a for a in grid if gain(a) > 0.031)
    assert gain(small) < 0.03
    planner = PairPlanner(Control())
    reasons = [
        planner.plan(view(alpha=alpha, running=8, token_s=0.002), now_s).reason
        for alpha, now_s in (
            (losing, 0),
            (small, 3),
            (large, 6),
            (small, 9),
            (losing, 12),
            (large, 13),
            (large, 15),
        )
    ]
    # Off, small gain stays off, on, small gain stays on, off, within the dwell, on.
    measured = ["not_paying" if reason == "measuring" else reason for reason in reasons]
    assert measured == ["not_paying", "not_paying", "best", "best", "not_paying", "not_paying", "best"]


def test_probes_five_per_cent_of_traffic_and_never_at_rest() -> None:
    planner = PairPlanner(Control())
    plans = [planner.plan(view(alpha=0.05), tick * 0.01) for tick in range(4000)]
    probing = [plan.draft_tokens for plan in plans if plan.draft_tokens]
    assert set(probing) == {1, 2}
    assert len(probing) == pytest.approx(0.05 * len(plans), rel=0.1)
    assert {plan.reason for plan in plans} == {"not_paying", "measuring"}
    idle = PairPlanner(Control())
    assert {idle.plan(view(alpha=0.05, running=0), tick * 0.01).draft_tokens for tick in range(1000)} == {0}


def test_measures_before_it_judges() -> None:
    unknown = PairView(running=3)
    for seen in (unknown, PairView(terms=StepTerms(0.02), verified_tokens=63, alpha=0.1, rounds=20)):
        plan = PairPlanner(Control()).plan(seen, 0.0)
        assert (plan.draft_tokens, plan.reason) == (4, "measuring")
        assert 0.0 < plan.max_wait_s <= 0.02
    assert PairPlanner(Control(k_max=2)).plan(unknown, 0.0).draft_tokens == 2


def test_a_drafter_that_brings_nothing_stops_being_asked() -> None:
    seen = PairView(terms=StepTerms(0.02), rounds=300, undrafted_share=1.0, running=1)
    plan = PairPlanner(Control()).plan(seen, 0.0)
    assert (plan.draft_tokens, plan.reason) == (0, "not_paying")


@pytest.mark.parametrize(
    ("changes", "draft_tokens", "reason"),
    [
        ({"control": {"kind": "off"}}, 0, "off"),
        ({"speculation": {"enabled": False}}, 0, "off"),
        ({"speculation": {"k": 5}}, 5, "fixed"),
        ({"speculation": {"k": 0}}, 0, "fixed"),
        ({"control": {"kind": "fixed", "arg": 3.0}}, 3, "fixed"),
        ({"control": {"kind": "fixed", "arg": 3.0}, "speculation": {"k": 5}}, 3, "fixed"),
        ({"control": {"kind": "off"}, "speculation": {"k": 5}}, 0, "off"),
    ],
)
def test_configured_lengths(changes: dict[str, object], draft_tokens: int, reason: str) -> None:
    planner = PairPlanner(Control.from_settings(Settings.model_validate(changes)))
    for seen in (PairView(), view(), view(alpha=0.0)):
        plan = planner.plan(seen, 0.0)
        assert (plan.draft_tokens, plan.reason) == (draft_tokens, reason)


@pytest.mark.parametrize("kind", ["threshold", "smartspec", "schedule", "adaspec"])
def test_controls_to_come_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.kind.*not available yet"):
        Control.from_settings(Settings.model_validate({"control": {"kind": kind}}))


@pytest.mark.parametrize("arg", [None, -1.0, 2.5, 17.0])
def test_fixed_needs_a_draft_length(arg: float | None) -> None:
    with pytest.raises(ConfigError, match=r"control\.arg"):
        Control.from_settings(Settings.model_validate({"control": {"kind": "fixed", "arg": arg}}))


def test_lengths_that_arrive_too_late_are_left_out() -> None:
    # Base 1 ms and 6 ms a token: three tokens fit into the plain step of 20 ms, a fourth never does.
    certain = view(alpha=1.0, token_s=0.0, draft_s=0.006)
    assert PairPlanner(Control()).plan(certain, 0.0).draft_tokens == 3
    # Waiting for all of them, or not even one being in time, leaves every length open.
    assert PairPlanner(Control(wait="always")).plan(certain, 0.0).draft_tokens == 8
    late = view(alpha=1.0, token_s=0.0, draft_s=0.03, undrafted=0.5)
    assert PairPlanner(Control()).plan(late, 0.0).draft_tokens == 8


def test_waiting_rules() -> None:
    slow = view(draft_s=0.02)
    bounds = {}
    for wait in ("auto", "always", "never"):
        model = slow.round_model(wait)
        assert model is not None
        bounds[wait] = model.wait_s(8)
    assert bounds == pytest.approx({"auto": 0.022, "always": 0.161, "never": 0.0})
