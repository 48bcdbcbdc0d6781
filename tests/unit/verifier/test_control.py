"""Local decisions: draft length, holding, absurd plans, what a plan predicts."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.control import DraftRule, draft_length, hold_s, plan_fault, predicted_latency
from paceline.core.types import DraftPlan
from paceline.v1 import policy_pb2
from paceline.verifier.drafting import Drafting
from paceline.verifier.policy_link import PolicyLink
from paceline.verifier.reports import DraftTally, Reports
from paceline.wire.convert import draft_plan_to_proto

PLAN = DraftPlan(drafter_id="d0", draft_tokens=5, reason="best")


@pytest.mark.parametrize(
    ("rule", "plan", "fields", "expected"),
    [
        (DraftRule(), None, {}, (4, "default")),
        (DraftRule(k_max=2), None, {}, (2, "default")),
        (DraftRule(), PLAN, {}, (5, "best")),
        (DraftRule(k_max=3), PLAN, {}, (3, "best")),
        (DraftRule(), replace(PLAN, draft_tokens=0, reason="not_paying"), {}, (0, "not_paying")),
        (DraftRule(fixed_tokens=12), PLAN, {}, (12, "fixed")),
        (DraftRule(fixed_tokens=0), PLAN, {}, (0, "fixed")),
        (DraftRule(enabled=False), PLAN, {}, (0, "off")),
        (DraftRule(), PLAN, {"enabled": False}, (0, "off")),
        (DraftRule(), PLAN, {"max_draft_tokens": 2}, (2, "best")),
        (DraftRule(), PLAN, {"max_draft_tokens": 0}, (0, "request")),
        (DraftRule(), PLAN, {"tokens_left": 3}, (2, "best")),
        (DraftRule(), PLAN, {"tokens_left": 1}, (0, "ending")),
        (DraftRule(), PLAN, {"draw": 0.0}, (4, "best")),
        (DraftRule(), PLAN, {"draw": 0.999}, (6, "best")),
        (DraftRule(fixed_tokens=5), PLAN, {"draw": 0.999}, (5, "fixed")),
        (DraftRule(), replace(PLAN, draft_tokens=1), {"draw": 0.0}, (1, "best")),
    ],
)
def test_draft_length(rule: DraftRule, plan: Any, fields: dict[str, Any], expected: tuple[int, str]) -> None:
    common: dict[str, Any] = {"max_draft_tokens": None, "tokens_left": 100, "draw": 0.5}
    decision = draft_length(rule, plan, **{**common, **fields})
    assert (decision.tokens, decision.reason) == expected


def test_two_percent_of_rounds_are_dithered() -> None:
    lengths = [
        draft_length(DraftRule(), PLAN, max_draft_tokens=None, tokens_left=100, draw=i / 1000).tokens
        for i in range(1000)
    ]
    assert (lengths.count(4), lengths.count(6)) == (10, 10)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 5)), max_size=6),
    st.floats(0, 100),
    st.floats(0, 1),
)
def test_hold_is_the_best_of_all_waits(
    arrivals: list[tuple[float, float]], rate: float, limit: float
) -> None:
    def balance(r: float) -> float:
        return sum(gain for at, gain in arrivals if at <= r) - rate * r

    held = hold_s(arrivals, rate, limit)
    assert 0 <= held <= limit
    best = max([0.0, *(balance(at) for at, _ in arrivals if at <= limit)])
    assert math.isclose(balance(held) if held else max(0.0, balance(0.0)), best, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"draft_tokens": 9}, "draft_tokens"),
        ({"max_wait_s": math.nan}, "max_wait_s"),
        ({"max_wait_s": math.inf}, "max_wait_s"),
        ({"step_base_s": -1.0}, "step_base_s"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"undrafted_share": math.nan}, "undrafted_share"),
        ({"draft_token_s": -math.inf}, "draft_token_s"),
    ],
)
def test_absurd_plans_are_ignored_and_counted(change: dict[str, Any], field: str) -> None:
    assert plan_fault(PLAN, 8) is None
    link = PolicyLink("", snapshot=policy_pb2.SyncRequest, reports=Reports(), longest=8)
    link.take(policy_pb2.SyncResponse(plans=[draft_plan_to_proto(PLAN)]))
    link.take(policy_pb2.SyncResponse(plans=[draft_plan_to_proto(replace(PLAN, **change))]))
    assert link.ignored == {field: 1}
    assert link.plan("d0") == PLAN, "the last good plan stays"


def test_predicted_latency_by_hand() -> None:
    assert (
        predicted_latency(DraftPlan(), running=0, prompt_tokens=1, output_tokens=1, chunk_tokens=8).tpot_ms
        == 0
    )
    plan = DraftPlan(
        draft_tokens=1,
        max_wait_s=0.5,
        step_base_s=0.010,
        step_token_s=0.001,
        acceptance=0.5,
        draft_base_s=0.002,
        draft_token_s=0.001,
    )
    found = predicted_latency(plan, running=1, prompt_tokens=20, output_tokens=11, chunk_tokens=10)
    # A step verifies 2 tokens of 2 sequences: 14 ms, and waits 3 ms, for 1.5 tokens.
    assert found.tpot_ms == pytest.approx((14 + 3) / 1.5)
    # Two chunks in plain steps of 12 ms, and the prompt's own 20 tokens.
    assert found.ttft_ms == pytest.approx(2 * 12 + 20)
    assert found.e2e_ms == pytest.approx(found.ttft_ms + 10 * found.tpot_ms)


def test_tally_counts_by_position() -> None:
    tally = DraftTally("ngram")
    tally.round(3, 3, 2, 0.5)
    tally.round(3, 1, 1, 0.0)
    tally.round(3, 0, 0, 0.0)
    tally.round(0, 0, 0, 0.0)
    message = tally.to_proto("d")
    assert (message.rounds, message.undrafted_rounds, message.asked_tokens) == (3, 1, 9)
    assert list(message.verified_by_position) == [2, 1, 1]
    assert list(message.accepted_by_position) == [2, 1, 0]


class FakeLink:
    """A ready link whose answers never come."""

    def __init__(self, expected_s: float) -> None:
        self.id, self.kind, self.ready, self.responsive = "d0", "ngram", True, True
        self.expected_s = expected_s
        self.acceptance = 0.5
        self.sessions = SimpleNamespace(
            max_context_tokens=0, ask=lambda *_: None, close=lambda _: None, open=lambda _: None
        )
        self.asked = True

    def expected_in_s(self, choice: Any, now_s: float) -> float | None:
        return self.expected_s if self.asked else None


def asking(link: FakeLink, wait: str) -> tuple[Drafting, Any]:
    ticks = itertools.count()
    drafting = Drafting(
        [link],
        lambda _: None,
        rule=DraftRule(),
        wait=wait,
        clock=lambda: float(next(ticks)),
    )
    choice = SimpleNamespace(
        session_id=1,
        speculation=SimpleNamespace(drafter="", enabled=True, max_draft_tokens=None),
        receipt=SimpleNamespace(drafters=[]),
        sequence=SimpleNamespace(tokens=[1]),
        asked_tokens=0,
    )
    drafting.ask(choice, 100)
    assert choice.asked_tokens == 4
    return drafting, choice


async def test_a_silent_drafter_costs_one_hold() -> None:
    link = FakeLink(0.001)
    drafting, choice = asking(link, "auto")
    assert await drafting.hold([choice], tokens_per_s=10.0, step_s=0.1) > 0
    assert not link.responsive
    assert await drafting.hold([choice], tokens_per_s=10.0, step_s=0.1) == 0


@pytest.mark.parametrize(
    ("expected_s", "rate", "step_s"),
    [(0.05, 10.0, 0.01), (0.05, 1000.0, 0.1), (0.0, 10.0, 0.1)],
    ids=["longer than a step", "costs more than it brings", "never measured"],
)
async def test_no_hold_that_does_not_pay(expected_s: float, rate: float, step_s: float) -> None:
    drafting, choice = asking(FakeLink(expected_s), "auto")
    assert await drafting.hold([choice], tokens_per_s=rate, step_s=step_s) == 0


async def test_never_holds_never_and_always_until_the_answer() -> None:
    drafting, choice = asking(FakeLink(0.001), "never")
    assert await drafting.hold([choice], 1.0, 1.0) == 0
    link = FakeLink(0.001)
    drafting, choice = asking(link, "always")
    holding = asyncio.ensure_future(drafting.hold([choice], 1.0, 0.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not holding.done()
    link.asked = False
    drafting.news.set()
    assert await holding > 0


async def test_a_lost_link_ends_the_hold() -> None:
    link = FakeLink(0.001)
    drafting, choice = asking(link, "always")
    holding = asyncio.ensure_future(drafting.hold([choice], 1.0, 0.0))
    await asyncio.sleep(0)
    link.ready = False
    drafting.news.set()
    await holding
    assert drafting.lost(choice)
    drafting.ask(choice, 100)
    assert (choice.asked_tokens, choice.decision.reason) == (0, "no_drafter")
