"""Values that cross service boundaries, free of protobuf. Field meanings are those of protos/paceline/v1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

GREEDY_TEMPERATURE = 1e-3
"""Below this the next token is the argmax."""


class SpeculationMode(StrEnum):
    COUPLED = "coupled"
    REJECTION = "rejection"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class WorkerRole(StrEnum):
    VERIFIER = "verifier"
    DRAFTER = "drafter"


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; every field has its effective value (`core.params` validates)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    min_tokens: int = 0
    ignore_eos: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    enabled: bool = True
    max_draft_tokens: int | None = None
    mode: SpeculationMode = SpeculationMode.COUPLED
    drafter: str = ""
    receipt: bool = False


@dataclass(frozen=True, slots=True)
class SloClass:
    """Targets of 0 mean none."""

    name: str = "default"
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log probabilities of the target: the chosen token's, and the top ones as (id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """q of one drafted position in rejection mode: what the draft token was sampled from.

    The drafter's distribution truncated to its likeliest tokens and renormalized: ``probs`` belong to
    ``token_ids``, sum to 1 up to rounding, and the draft token is among them.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LatencyMs:
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    e2e_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of one sequence: tokens verified, asked, arrived, accepted; why that draft length."""

    k: int
    asked: int
    arrived: int
    accepted: int
    waited_ms: float
    reason: str


@dataclass(frozen=True, slots=True)
class TermSeconds:
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    network: float = 0.0
    queue: float = 0.0

    def __add__(self, other: TermSeconds) -> TermSeconds:
        return TermSeconds(
            self.prefill + other.prefill,
            self.draft + other.draft,
            self.verify + other.verify,
            self.network + other.network,
            self.queue + other.queue,
        )


@dataclass(slots=True)
class Receipt:
    """What was drafted, accepted, predicted and observed for one choice.

    drafted = verified + pruned + late + trimmed; verified >= accepted.
    """

    request_id: str = ""
    model: str = ""
    seed: int = 0
    exact: bool = False
    synthetic: bool = False
    verifiers: list[str] = field(default_factory=list)
    drafters: list[tuple[str, str]] = field(default_factory=list)
    rounds: int = 0
    undrafted_rounds: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    pruned_tokens: int = 0
    late_tokens: int = 0
    trimmed_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    draft_length_histogram: Counter[int] = field(default_factory=Counter)
    wait_ms: float = 0.0
    min_race_margin: float | None = None
    resumes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    predicted: LatencyMs = LatencyMs()
    observed: LatencyMs = LatencyMs()

    def merged(self, later: Receipt) -> Receipt:
        """This receipt continued by the one of the verifier that resumed the choice."""
        length = max(len(self.accepted_by_position), len(later.accepted_by_position))
        margins = [m for m in (self.min_race_margin, later.min_race_margin) if m is not None]
        return replace(
            later,
            exact=self.exact and later.exact,
            synthetic=self.synthetic or later.synthetic,
            verifiers=[*self.verifiers, *(v for v in later.verifiers if v not in self.verifiers)],
            drafters=[*self.drafters, *(d for d in later.drafters if d not in self.drafters)],
            rounds=self.rounds + later.rounds,
            undrafted_rounds=self.undrafted_rounds + later.undrafted_rounds,
            drafted_tokens=self.drafted_tokens + later.drafted_tokens,
            verified_tokens=self.verified_tokens + later.verified_tokens,
            accepted_tokens=self.accepted_tokens + later.accepted_tokens,
            pruned_tokens=self.pruned_tokens + later.pruned_tokens,
            late_tokens=self.late_tokens + later.late_tokens,
            trimmed_tokens=self.trimmed_tokens + later.trimmed_tokens,
            accepted_by_position=[
                _at(self.accepted_by_position, i) + _at(later.accepted_by_position, i) for i in range(length)
            ],
            draft_length_histogram=self.draft_length_histogram + later.draft_length_histogram,
            wait_ms=self.wait_ms + later.wait_ms,
            min_race_margin=min(margins) if margins else None,
            resumes=self.resumes + later.resumes,
            reasons=self.reasons + later.reasons,
        )

    def to_json(self) -> dict[str, object]:
        """The contract's form: names of the proto, lists and maps as JSON has them."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "seed": self.seed,
            "exact": self.exact,
            "synthetic": self.synthetic,
            "verifiers": list(self.verifiers),
            "drafters": [{"id": i, "kind": k} for i, k in self.drafters],
            "rounds": self.rounds,
            "undrafted_rounds": self.undrafted_rounds,
            "drafted_tokens": self.drafted_tokens,
            "verified_tokens": self.verified_tokens,
            "accepted_tokens": self.accepted_tokens,
            "pruned_tokens": self.pruned_tokens,
            "late_tokens": self.late_tokens,
            "trimmed_tokens": self.trimmed_tokens,
            "accepted_by_position": list(self.accepted_by_position),
            "draft_length_histogram": {str(k): n for k, n in sorted(self.draft_length_histogram.items())},
            "wait_ms": round(self.wait_ms, 3),
            "min_race_margin": self.min_race_margin,
            "resumes": self.resumes,
            "reasons": dict(sorted(self.reasons.items())),
            "predicted": {
                "ttft_ms": round(self.predicted.ttft_ms, 3),
                "tpot_ms": round(self.predicted.tpot_ms, 3),
                "e2e_ms": round(self.predicted.e2e_ms, 3),
            },
            "observed": {
                "queue_ms": round(self.observed.queue_ms, 3),
                "ttft_ms": round(self.observed.ttft_ms, 3),
                "tpot_ms": round(self.observed.tpot_ms, 3),
                "e2e_ms": round(self.observed.e2e_ms, 3),
            },
        }


def _at(counts: Sequence[int], i: int) -> int:
    return counts[i] if i < len(counts) else 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass: what it held and the seconds it took."""

    sequences: int
    query_tokens: int
    prefill_tokens: int
    query_context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a verifier decides with until the next plan; terms as in the latency model (seconds)."""

    plan: int = 0
    drafter_id: str = ""
    draft_tokens: int = 4
    max_wait_s: float = 0.02
    step_base_s: float = 0.0
    step_sequence_s: float = 0.0
    step_token_s: float = 0.0
    step_query_context_s: float = 0.0
    acceptance: float = 0.0
    undrafted_share: float = 0.0
    draft_base_s: float = 0.0
    draft_token_s: float = 0.0
    round_trip_s: float = 0.0
    reason: str = "measuring"
