"""Answers from the latency model: one request's latencies, and why a pair has its draft length."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.latency import Workload, break_even_rps
from paceline.core.types import DraftPlan
from paceline.policy.planner import Control, PairView


@dataclass(frozen=True, slots=True)
class Prediction:
    ttft_s: float
    tpot_s: float

    def e2e_s(self, output_tokens: int) -> float:
        return self.ttft_s + max(0, output_tokens - 1) * self.tpot_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, TPOT in seconds by draft length (empty until measured), and the break-even request rate."""

    plan: DraftPlan
    tpot_s: tuple[float, ...]
    break_even_rps: float | None


def predict(
    view: PairView,
    control: Control,
    draft_tokens: int,
    work: Workload,
    *,
    waiting: int = 0,
    max_sequences: int = 0,
) -> Prediction | None:
    """Latencies of one more request beside those running; None until steps were measured.

    TTFT: half a step until the next begins, the prompt's compute, and the steps its chunks ride in. Waiting
    requests ahead each take the time of an equal request, ``max_sequences`` at a time.
    """
    sequences = view.running + 1
    if max_sequences:
        sequences = min(sequences, max_sequences)
    model = view.round_model(control.wait, running=sequences)
    if model is None or view.terms is None:
        return None
    tpot_s = model.tpot_s(draft_tokens)
    step_s = view.terms.decode_s(sequences - 1, draft_tokens, view.context_tokens)
    busy_s = 0.5 * step_s if view.running else 0.0
    ttft_s = busy_s + work.chunks * step_s + view.terms.prompt_s(work.prompt_tokens, work.chunk_tokens)
    if waiting:
        ttft_s += (waiting / max(max_sequences, sequences)) * (ttft_s + work.output_tokens * tpot_s)
    return Prediction(ttft_s, tpot_s)


def explain(view: PairView, control: Control, plan: DraftPlan, work: Workload) -> Explanation:
    """The neighbours 0..k_max at the present load, and the load at which drafting stops paying.

    The rate is that of the fixed length where one is set, else of the best of 1..k_max.
    """
    model = view.round_model(control.wait)
    if model is None or view.terms is None or view.alpha is None:
        return Explanation(plan, (), None)
    fixed = control.fixed_tokens
    lengths = range(1, control.k_max + 1) if fixed is None else [fixed] if fixed else []
    longest = max(control.k_max, fixed or 0)
    tpot_s = tuple(model.tpot_s(k) for k in range(longest + 1))
    return Explanation(plan, tpot_s, break_even_rps(view.terms, model, lengths, work))
