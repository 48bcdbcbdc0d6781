"""What one engine step holds and returns: the seam between scheduling (no torch) and a runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.types import DraftDistribution, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RejectionKeys:
    """Noise keys of a verified sequence in rejection mode, of the domains ACCEPT and RESIDUAL."""

    accept: int
    residual: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice (or draft session) in an engine. The scheduler owns ``computed`` and ``blocks``;
    whoever commits tokens appends to ``tokens`` through the scheduler."""

    id: int
    tokens: list[int]
    """Original prompt, then committed tokens."""
    prompt_tokens: int
    """Length of the original prompt; output position i is token ``prompt_tokens + i``."""
    params: SamplingParams
    noise_key: int
    stop_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop ids: masked while fewer than ``min_tokens`` are committed."""
    rejection: RejectionKeys | None = None
    """Set where drafts are verified by rejection sampling instead of coupled sampling."""
    truncate_to: int = 0
    """On a drafter in rejection mode: tokens are sampled from so many likeliest ones, and the result tells
    their distribution. 0 samples from all."""
    computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    """Block i holds positions ``i * block_tokens`` onwards."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at admission."""
    chain: object = None
    """Logits processors with their state, made and kept level by the runner's sampler."""


@dataclass(frozen=True, slots=True)
class StepItem:
    """One sequence's part of a step.

    Args:
        sequence: its block table covers ``start + len(token_ids)`` positions.
        start: position of the first token fed, ``sequence.computed``.
        token_ids: committed tokens not yet computed (a prefill chunk, or the last token), then the draft.
        draft: the trailing part of ``token_ids`` that is proposed, not committed.
        samples: number of trailing positions at which the target chooses: ``len(draft) + 1``, or 0 for a
            prefill chunk that does not reach the end of the committed tokens.
        draft_q: in rejection mode what each draft token was sampled from; empty for point masses.
    """

    sequence: Sequence
    start: int
    token_ids: tuple[int, ...]
    draft: tuple[int, ...]
    samples: int
    draft_q: tuple[DraftDistribution, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    items: tuple[StepItem, ...]

    @property
    def sequences(self) -> int:
        return len(self.items)

    @property
    def query_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def prefill_tokens(self) -> int:
        """Committed tokens fed beyond the one each decoding sequence needs."""
        return sum(len(item.token_ids) - max(item.samples, 0) for item in self.items)

    @property
    def query_context(self) -> int:
        """Sum over sequences of query tokens times context length."""
        return sum(len(item.token_ids) * (item.start + len(item.token_ids)) for item in self.items)


@dataclass(slots=True)
class ItemResult:
    """What the target chose at each of an item's ``samples`` positions.

    In rejection mode ``chosen`` repeats a draft token that was accepted; a residual's sample is never the
    draft token, so the accepted length is the common prefix in both modes.

    ``margins`` are race margins: best minus second of log p - log E (of the logits when greedy); none in
    rejection mode. ``error`` is set instead when this sequence's logits were not finite; only its request
    fails. ``distributions`` are set where the sequence has ``truncate_to`` and is not greedy.
    """

    chosen: list[int]
    margins: list[float]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    distributions: list[DraftDistribution] | None = None


class Runner(Protocol):
    """Computes steps over a paged KV cache of ``num_blocks`` blocks of ``block_tokens`` positions.

    ``execute`` blocks (call it off the event loop), writes the keys and values of every token fed, and
    changes no sequence. Positions at or beyond ``sequence.computed`` are overwritten by later steps, so a
    rejected draft needs no clean-up.
    """

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    block_tokens: int
    num_blocks: int
    slowdown: float
    """Factor on the time of every step; 1 is none."""

    def execute(self, plan: StepPlan) -> list[ItemResult]: ...

    def fail_next(self, sequence_id: int) -> None:
        """Testing: the next logits of this sequence become NaN."""

    def close(self) -> None: ...
