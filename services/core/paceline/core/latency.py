"""The latency model in closed form (Kong et al. 2026, arXiv 2605.15051; split-fleet terms of our own).

Indices: 1 load-independent, 2 load-dependent; p prefill, v verify, d draft. All times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
