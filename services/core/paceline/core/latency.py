"""The latency model in closed form (Kong et al. 2026, arXiv 2605.15051; split-fleet terms of our own).

Indices: 1 load-independent, 2 load-dependent; p prefill, v verify, d draft. All times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


def expected_tokens(alpha: float, k: int) -> float:
    """E(alpha, k) = (1 - alpha**(k+1)) / (1 - alpha): tokens a round commits, the bonus token included."""
    if alpha >= 1.0:
        return float(k + 1)
    return float((1.0 - alpha ** (k + 1)) / (1.0 - alpha))


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One index (load-independent or load-dependent) of a target and drafter pair."""

    prefill_s: float
    verify_s: float
    draft_s: float

    def effective(self, alpha: float, k: int, output_tokens: float) -> float:
        """C_i = c_ip + (g / E)(c_iv + k c_id), paper eq. 3."""
        rounds = output_tokens / expected_tokens(alpha, k)
        return self.prefill_s + rounds * (self.verify_s + k * self.draft_s)


def mean_latency(c1_s: float, c2_s: float, rate_rps: float) -> float:
    """L = C1 / (1 - RPS C2), by Little's law; infinite at and beyond saturation (RPS >= 1 / C2)."""
    load = rate_rps * c2_s
    return c1_s / (1.0 - load) if load < 1.0 else math.inf


def speedup(c1_ratio: float, c2_ratio: float, load: float) -> float:
    """S = (1 / C1R)(1 - r C2R) / (1 - r), r the plain system's load in [0, 1); paper eq. 2.

    0 where drafting saturates first, infinite where only plain decoding saturates.
    """
    if load * c2_ratio >= 1.0:
        return 0.0 if load < 1.0 else math.nan
    if load >= 1.0:
        return math.inf
    return (1.0 - load * c2_ratio) / (c1_ratio * (1.0 - load))


def break_even_load(c1_ratio: float, c2_ratio: float) -> float | None:
    """r* = (1 - C1R) / (C2R - C1R): the load at which drafting stops paying; None if there is none."""
    if not c1_ratio < 1.0 < c2_ratio:
        return None
    return (1.0 - c1_ratio) / (c2_ratio - c1_ratio)


@dataclass(frozen=True, slots=True)
class RoundModel:
    """One round of a split pair at a given load (design section 6, split fleet).

    Args:
        step_s: seconds of one verifier step as a function of the draft length k of its sequences.
        draft_base_s: round trip plus drafter queueing.
        draft_token_s: drafter compute for each draft token.
        alpha: acceptance rate of a verified token given those before it.
        undrafted_share: m, the share of rounds to which no usable token comes.
        max_wait_s: w, the longest a sequence waits for its proposal.
    """

    step_s: Callable[[int], float]
    draft_base_s: float
    draft_token_s: float
    alpha: float
    undrafted_share: float
    max_wait_s: float

    def tokens(self, k: int) -> float:
        """(1 - m) E + m."""
        m = self.undrafted_share if k else 0.0
        return (1.0 - m) * expected_tokens(self.alpha, k) + m

    def wait_s(self, k: int) -> float:
        """Exposed wait W without draft-ahead (pi = 0): min(D, w), D = base + k t_d."""
        return min(self.draft_base_s + k * self.draft_token_s, self.max_wait_s) if k else 0.0

    def tpot_s(self, k: int) -> float:
        """TPOT = (t_v + W) / E."""
        return (self.step_s(k) + self.wait_s(k)) / self.tokens(k)

    def best_draft_length(self, k_max: int) -> int:
        """The k in 0..k_max with the least TPOT; the smaller on a tie."""
        return min(range(k_max + 1), key=self.tpot_s)


@dataclass(frozen=True, slots=True)
class StepTerms:
    """Seconds of one forward pass: a + b sequences + c decode tokens + d query x context + e prefill tokens.

    Decode tokens are those fed to sequences that sample (1, or k + 1 when verifying); the query-context sum
    runs over all tokens.
    """

    base_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0
    query_context_s: float = 0.0
    prefill_token_s: float = 0.0

    def scaled(self, factor: float) -> StepTerms:
        """The same pass on a machine ``factor`` times slower."""
        return StepTerms(
            self.base_s * factor,
            self.sequence_s * factor,
            self.token_s * factor,
            self.query_context_s * factor,
            self.prefill_token_s * factor,
        )

    def resident_s(self, k: int, context_tokens: float) -> float:
        """What one decoding sequence adds to a step: b + (k + 1)(c + d context)."""
        return self.sequence_s + (k + 1) * (self.token_s + self.query_context_s * context_tokens)

    def decode_s(self, sequences: float, k: int, context_tokens: float) -> float:
        """A step in which every sequence verifies k draft tokens."""
        return self.base_s + sequences * self.resident_s(k, context_tokens)

    def prompt_s(self, prompt_tokens: int, chunk_tokens: int) -> float:
        """What a prompt adds to the steps its chunks of at most ``chunk_tokens`` ride in."""
        whole, rest = divmod(prompt_tokens, chunk_tokens)
        query_context = chunk_tokens**2 * whole * (whole + 1) / 2 + rest * prompt_tokens
        return self.prefill_token_s * prompt_tokens + self.query_context_s * query_context


@dataclass(frozen=True, slots=True)
class Workload:
    """Mean request: prompt and output tokens, and the longest prefill chunk."""

    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int

    @property
    def chunks(self) -> int:
        return max(1, math.ceil(self.prompt_tokens / self.chunk_tokens))

    @property
    def context_tokens(self) -> float:
        """Mean context while decoding, p + g / 2."""
        return self.prompt_tokens + self.output_tokens / 2


def pair_latency_terms(terms: StepTerms, rounds: RoundModel, k: int, work: Workload) -> tuple[float, float]:
    """(C1, C2) of a pair at draft length k, from the measured terms.

    Load-independent is what every step costs however few ride in it, and the exposed wait:
    c1p = a chunks, c1v + k c1d = a + W(k). Load-dependent is what one resident request adds to the steps of
    all: c2p = its prompt's compute, c2v + k c2d = b + (k + 1)(c + d (p + g/2)). Rounds are g over the mean
    tokens a round, undrafted rounds included.
    """
    count = work.output_tokens / rounds.tokens(k)
    c1 = terms.base_s * work.chunks + count * (terms.base_s + rounds.wait_s(k))
    c2 = terms.prompt_s(work.prompt_tokens, work.chunk_tokens)
    return c1, c2 + count * terms.resident_s(k, work.context_tokens)


def break_even_rps(
    terms: StepTerms, rounds: RoundModel, lengths: Iterable[int], work: Workload
) -> float | None:
    """Request rate up to which the best of the draft ``lengths`` pays.

    None when one of them pays at every stable rate, or none pays at any.
    """
    c1_plain, c2_plain = pair_latency_terms(terms, rounds, 0, work)
    if c1_plain <= 0.0 or c2_plain <= 0.0:
        return None
    rates = []
    for k in lengths:
        c1, c2 = pair_latency_terms(terms, rounds, k, work)
        if c1 < c1_plain and c2 <= c2_plain:
            return None
        load = break_even_load(c1 / c1_plain, c2 / c2_plain)
        if load is not None:
            rates.append(load / c2_plain)
    return max(rates, default=None)
