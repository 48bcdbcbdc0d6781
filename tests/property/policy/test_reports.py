"""Whatever workers report, plans stay finite and in their limits."""

from __future__ import annotations

import math
from dataclasses import astuple

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policy.admin import fleet_json
from paceline.policy.fleet import Fleet
from paceline.policy.planner import Control
from paceline.policy.reports import parse
from paceline.v1 import policy_pb2

UINT32 = st.integers(0, 2**32 - 1) | st.integers(0, 20)
UINT64 = st.integers(0, 2**64 - 1) | st.integers(0, 20)
SECONDS = st.floats(width=64) | st.floats(0.0, 1.0)
COUNTS = st.lists(UINT32, max_size=6)
STEP = st.builds(
    policy_pb2.StepRecord,
    sequences=UINT32,
    query_tokens=UINT32,
    prefill_tokens=UINT32,
    query_context=UINT64,
    seconds=SECONDS,
)
DRAFTS = st.builds(
    policy_pb2.DraftStats,
    drafter_id=st.sampled_from(["d0", "d1", "", "x" * 200]),
    rounds=UINT32,
    undrafted_rounds=UINT32,
    verified_by_position=COUNTS,
    accepted_by_position=COUNTS,
    arrived_tokens=UINT32,
    proposals=UINT32,
    elapsed_s=SECONDS,
    hold_s=SECONDS,
    queue_s=SECONDS,
    compute_s=SECONDS,
    waited_s=SECONDS,
)
REQUEST = st.builds(
    policy_pb2.RequestRecord, prompt_tokens=UINT32, output_tokens=UINT32, ttft_s=SECONDS, e2e_s=SECONDS
)
REPORT = st.builds(
    policy_pb2.SyncRequest,
    worker_id=st.sampled_from(["v0", "v1", "d0", "", "y" * 200]),
    role=st.integers(0, 5),
    state=st.integers(0, 6),
    worker_incarnation=st.integers(0, 3),
    pid=UINT32,
    report=UINT64,
    interval_s=SECONDS,
    running=UINT32,
    waiting=UINT32,
    sessions=UINT32,
    blocks_used=UINT32,
    max_sequences=UINT32,
    steps=st.lists(STEP, max_size=4).flatmap(lambda some: st.sampled_from([some, some * 20])),
    drafts=st.lists(DRAFTS, max_size=3),
    requests=st.lists(REQUEST, max_size=3),
)


def finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    if isinstance(value, list):
        return all(finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


@settings(max_examples=150, deadline=None)
@given(st.lists(REPORT, max_size=12))
def test_any_reports_give_finite_plans(messages: list[policy_pb2.SyncRequest]) -> None:
    now_s = 0.0
    fleet = Fleet(Control(), clock=lambda: now_s)
    link = object()
    for message in messages:
        report = parse(policy_pb2.SyncRequest.FromString(message.SerializeToString()), fleet.ignored)
        if report is not None:
            fleet.observe(report, link)
        now_s += 0.6
        fleet.replan()
    for verifier in ("v0", "v1"):
        for plan in fleet.plans_for(verifier):
            assert all(math.isfinite(x) and x >= 0.0 for x in astuple(plan) if isinstance(x, float))
            assert 0 <= plan.draft_tokens <= 8
            assert 0.0 <= plan.acceptance <= 1.0
            assert 0.0 <= plan.undrafted_share <= 1.0
        prediction = fleet.predict(2**32 - 1, 2**32 - 1)
        assert prediction is None or math.isfinite(prediction.e2e_s(2**32 - 1))
    assert finite(fleet_json(fleet))
    assert all(0.0 <= pair.weight <= 1.0 for pair in fleet.pairs)


@given(st.floats())
def test_impossible_step_times_are_counted(seconds: float) -> None:
    message = policy_pb2.SyncRequest(
        worker_id="v0",
        role="WORKER_ROLE_VERIFIER",
        state="WORKER_STATE_READY",
        report=1,
        steps=[policy_pb2.StepRecord(sequences=1, query_tokens=1, query_context=5, seconds=seconds)],
    )
    fleet = Fleet(Control(), clock=lambda: 0.0)
    report = parse(message, fleet.ignored)
    assert report is not None
    possible = 0.0 <= seconds <= 3600.0
    assert len(report.steps) == possible
    assert fleet.ignored.total() == 1 - possible
