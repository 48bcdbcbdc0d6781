"""Workers' reports, checked: what is impossible is left out and counted by reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.types import StepRecord, WorkerRole, WorkerState
from paceline.policy.estimates import RoundCounts
from paceline.v1 import policy_pb2, worker_pb2
from paceline.wire.convert import step_record_from_proto

MAX_SECONDS = 3600.0
"""Longer steps, proposals and gaps are taken for broken clocks."""
MAX_SEQUENCES = 1_000_000
MAX_TOKENS = 100_000_000
MAX_POSITIONS = 64
MAX_ID_CHARACTERS = 128
MAX_ITEMS = 10_000

_ROLES = {
    worker_pb2.WORKER_ROLE_VERIFIER: WorkerRole.VERIFIER,
    worker_pb2.WORKER_ROLE_DRAFTER: WorkerRole.DRAFTER,
}
_STATES = {
    worker_pb2.WORKER_STATE_STARTING: WorkerState.STARTING,
    worker_pb2.WORKER_STATE_READY: WorkerState.READY,
    worker_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
}


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    slo_class: str


@dataclass(frozen=True, slots=True)
class Report:
    """One report; ``drafts`` by drafter id."""

    worker_id: str
    role: WorkerRole
    state: WorkerState
    incarnation: int
    pid: int
    number: int
    running: int
    waiting: int
    sessions: int
    blocks_used: int
    max_sequences: int
    steps: tuple[StepRecord, ...]
    drafts: tuple[tuple[str, RoundCounts], ...]
    requests: tuple[FinishedRequest, ...]


def parse(message: policy_pb2.SyncRequest, ignored: Counter[str]) -> Report | None:
    """The usable part of a report, None if there is none; adds what it leaves out to ``ignored``."""
    role, state = _ROLES.get(message.role), _STATES.get(message.state)
    if (
        role is None
        or state is None
        or not 0 < len(message.worker_id) <= MAX_ID_CHARACTERS
        or message.report < 1
        or message.running > MAX_SEQUENCES
    ):
        ignored["malformed"] += 1
        return None
    steps, drafts, requests = [], [], []
    for record in message.steps[:MAX_ITEMS]:
        reason = _step_fault(record)
        if reason:
            ignored[reason] += 1
        else:
            steps.append(step_record_from_proto(record))
    for stats in message.drafts[:MAX_ITEMS]:
        reason = _draft_fault(stats)
        if reason:
            ignored[reason] += 1
        else:
            drafts.append((stats.drafter_id, _counts(stats)))
    for request in message.requests[:MAX_ITEMS]:
        if not _sane((request.ttft_s, request.e2e_s), 24 * MAX_SECONDS) or request.output_tokens < 1:
            ignored["request"] += 1
        else:
            requests.append(
                FinishedRequest(
                    request.prompt_tokens,
                    request.output_tokens,
                    request.ttft_s,
                    request.e2e_s,
                    request.slo_class[:MAX_ID_CHARACTERS] or "default",
                )
            )
    return Report(
        message.worker_id,
        role,
        state,
        message.worker_incarnation,
        message.pid,
        message.report,
        message.running,
        message.waiting,
        message.sessions,
        message.blocks_used,
        message.max_sequences,
        tuple(steps),
        tuple(drafts),
        tuple(requests),
    )


def _sane(seconds: Iterable[float], limit_s: float) -> bool:
    return all(math.isfinite(value) and 0.0 <= value <= limit_s for value in seconds)


def _step_fault(step: policy_pb2.StepRecord) -> str:
    if not _sane((step.seconds,), MAX_SECONDS):
        return "step_seconds"
    if not (
        0 < step.sequences <= MAX_SEQUENCES
        and step.sequences <= step.query_tokens <= MAX_TOKENS
        and step.prefill_tokens <= step.query_tokens
        and step.query_context <= step.query_tokens * MAX_TOKENS
    ):
        return "step_shape"
    return ""


def _draft_fault(stats: policy_pb2.DraftStats) -> str:
    verified, accepted = stats.verified_by_position, stats.accepted_by_position
    survivors = [*accepted]
    if not (
        0 < len(stats.drafter_id) <= MAX_ID_CHARACTERS
        and len(verified) == len(accepted) <= MAX_POSITIONS
        and all(a <= v for v, a in zip(verified, accepted, strict=True))
        and survivors == sorted(survivors, reverse=True)
        and stats.undrafted_rounds <= stats.rounds
        and max(stats.rounds, stats.proposals, stats.arrived_tokens, *verified, 0) <= MAX_TOKENS
    ):
        return "draft_counts"
    sums = (stats.elapsed_s, stats.hold_s, stats.queue_s, stats.compute_s, stats.waited_s)
    if not _sane(sums, MAX_SECONDS * max(stats.proposals, 1)):
        return "draft_seconds"
    return ""


def _counts(stats: policy_pb2.DraftStats) -> RoundCounts:
    return RoundCounts(
        stats.rounds,
        stats.undrafted_rounds,
        tuple(stats.verified_by_position),
        tuple(stats.accepted_by_position),
        stats.arrived_tokens,
        stats.proposals,
        stats.elapsed_s,
        stats.hold_s,
        stats.queue_s,
        stats.compute_s,
    )
