"""What a verifier decides by itself at every round: the draft length, and how long to hold a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.latency import RoundModel
from paceline.core.types import DraftPlan, LatencyMs

DEFAULT_DRAFT_TOKENS = 4
"""Before the first plan."""
DITHER_SHARE = 0.02
"""Rounds whose draft length is one off, so that step time can be told apart by tokens and by sequences."""


@dataclass(frozen=True, slots=True)
class DraftRule:
    """The configuration's say; ``fixed_tokens`` None follows the plan."""

    enabled: bool = True
    fixed_tokens: int | None = None
    k_max: int = 8


@dataclass(frozen=True, slots=True)
class DraftDecision:
    tokens: int
    reason: str


def draft_length(
    rule: DraftRule,
    plan: DraftPlan | None,
    *,
    enabled: bool = True,
    max_draft_tokens: int | None,
    tokens_left: int,
    draw: float,
) -> DraftDecision:
    """Draft tokens to ask for in the next round of one sequence.

    Args:
        plan: the last one of the drafter, if any.
        enabled: the request's own wish.
        max_draft_tokens: the request's limit.
        tokens_left: tokens that the round may commit at most; its last is the target's own.
        draw: uniform in [0, 1); its ends dither a planned length by one.
    """
    if not (rule.enabled and enabled):
        return DraftDecision(0, "off")
    if rule.fixed_tokens is not None:
        tokens, reason = rule.fixed_tokens, "fixed"
    else:
        if plan is None:
            tokens, reason = min(DEFAULT_DRAFT_TOKENS, rule.k_max), "default"
        else:
            tokens, reason = plan.draft_tokens, plan.reason
        if tokens:
            tokens = min(max(1, tokens + _dither(draw)), rule.k_max)
    if tokens and max_draft_tokens is not None and max_draft_tokens < tokens:
        tokens = max_draft_tokens
        reason = reason if tokens else "request"
    if tokens > tokens_left - 1:
        tokens = max(0, tokens_left - 1)
        reason = reason if tokens else "ending"
    return DraftDecision(tokens, reason)


def hold_s(arrivals: Iterable[tuple[float, float]], tokens_per_s: float, limit_s: float) -> float:
    """How long to hold the next step for proposals; 0 when holding does not pay.

    Holding until r gains the expected extra tokens of the proposals that arrive by then and loses
    ``tokens_per_s * r``; the r with the best balance is taken.

    Args:
        arrivals: of each proposal on its way, the seconds until it is expected and its gain in tokens,
            E(alpha, k) - 1.
        tokens_per_s: tokens committed a second now.
        limit_s: the longest hold.
    """
    best, best_s, gained = 0.0, 0.0, 0.0
    for arrives_s, gain in sorted(arrivals):
        if arrives_s > limit_s:
            break
        gained += gain
        balance = gained - tokens_per_s * max(0.0, arrives_s)
        if balance > best:
            best, best_s = balance, max(0.0, arrives_s)
    return best_s


def plan_fault(plan: DraftPlan, longest: int) -> str | None:
    """The field that makes a plan absurd, or None; ``longest`` is the greatest sensible draft length."""
    if not 0 <= plan.draft_tokens <= longest:
        return "draft_tokens"
    for name in _SECONDS:
        value = getattr(plan, name)
        if not (math.isfinite(value) and 0.0 <= value <= _LONGEST_S):
            return name
    for name in ("acceptance", "undrafted_share"):
        value = getattr(plan, name)
        if not 0.0 <= value <= 1.0:
            return name
    return None


_LONGEST_S = 3600.0
_SECONDS = (
    "max_wait_s",
    "step_base_s",
    "step_sequence_s",
    "step_token_s",
    "step_query_context_s",
    "draft_base_s",
    "draft_token_s",
    "round_trip_s",
)


def _dither(draw: float) -> int:
    if draw < DITHER_SHARE / 2:
        return -1
    return 1 if draw >= 1.0 - DITHER_SHARE / 2 else 0


def predicted_latency(
    plan: DraftPlan, *, running: int, prompt_tokens: int, output_tokens: int, chunk_tokens: int
) -> LatencyMs:
    """Latencies that a plan's terms give to one more request beside ``running`` others; 0 while unmeasured.

    A plan has one coefficient for all tokens, so that a prompt's compute is priced as decode tokens are.
    """
    step_base_s = plan.step_base_s
    if plan.step_base_s + plan.step_sequence_s + plan.step_token_s + plan.step_query_context_s <= 0.0:
        return LatencyMs()
    context = prompt_tokens + output_tokens / 2

    def step_s(k: int) -> float:
        tokens_s = (k + 1) * (plan.step_token_s + plan.step_query_context_s * context)
        return step_base_s + (running + 1) * (plan.step_sequence_s + tokens_s)

    model = RoundModel(
        step_s,
        plan.draft_base_s,
        plan.draft_token_s,
        plan.acceptance,
        plan.undrafted_share,
        plan.max_wait_s,
    )
    tpot_s = model.tpot_s(plan.draft_tokens)
    chunks = max(1, math.ceil(prompt_tokens / chunk_tokens))
    prompt_s = prompt_tokens * (plan.step_token_s + plan.step_query_context_s * prompt_tokens / 2)
    ttft_s = chunks * step_s(0) + prompt_s
    return LatencyMs(
        ttft_ms=ttft_s * 1e3,
        tpot_ms=tpot_s * 1e3,
        e2e_ms=(ttft_s + max(0, output_tokens - 1) * tpot_s) * 1e3,
    )
