"""What the rounds of one (verifier, drafter) pair show: acceptance, undrafted share, proposal times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """One report's rounds of a pair; sums, as in the proto's DraftStats."""

    rounds: int = 0
    undrafted_rounds: int = 0
    verified_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    arrived_tokens: int = 0
    proposals: int = 0
    elapsed_s: float = 0.0
    hold_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Seconds from ask to proposal: base + tokens x token; the base holds the round trip and the queue."""

    base_s: float = 0.0
    token_s: float = 0.0
    round_trip_s: float = 0.0
    queue_s: float = 0.0


class DecayedShare:
    """A share of counts that forgets with evidence and with time, but not below ``floor`` counts.

    Args:
        memory: counts after which old ones weigh 1/e.
        memory_s: seconds after which old counts weigh 1/e, once others replace them.
        floor: counts kept however old, so that a little new evidence does not upset a share.
    """

    def __init__(self, *, memory: float, memory_s: float, floor: float) -> None:
        self._memory = memory
        self._memory_s = memory_s
        self._floor = floor
        self._added_at_s = 0.0
        self.part = 0.0
        self.whole = 0.0

    def add(self, part: float, whole: float, now_s: float) -> None:
        """Adds counts; nothing changes when ``whole`` is 0."""
        if whole <= 0.0:
            return
        age_s = now_s - self._added_at_s
        self._added_at_s = now_s
        keep = math.exp(-whole / self._memory - age_s / self._memory_s)
        if self.whole > 0.0:
            keep = min(1.0, max(keep, (self._floor - whole) / self.whole))
        self.part = self.part * keep + part
        self.whole = self.whole * keep + whole

    @property
    def share(self) -> float | None:
        return min(1.0, self.part / self.whole) if self.whole > 0.0 else None


class PairEstimates:
    """Acceptance, undrafted share and proposal times of a pair; a pair at rest keeps what it knows.

    Args:
        timing_reports: reports kept for proposal times; each weighs ``timing_decay`` of the next newer.
    """

    def __init__(self, *, timing_reports: int = 64, timing_decay: float = 0.9) -> None:
        self._timing_decay = timing_decay
        self._timing: deque[RoundCounts] = deque(maxlen=timing_reports)
        self._fitted: DraftTiming | None = None
        self._undrafted = DecayedShare(memory=1000.0, memory_s=10.0, floor=64.0)
        self.acceptance = DecayedShare(memory=2000.0, memory_s=10.0, floor=128.0)
        self.verified_tokens = 0
        self.rounds = 0

    def add(self, counts: RoundCounts, now_s: float) -> None:
        """Takes one valid report (`reports` checks them)."""
        trials = conditional_trials(counts.verified_by_position, counts.accepted_by_position)
        self.acceptance.add(sum(counts.accepted_by_position), trials, now_s)
        self._undrafted.add(counts.undrafted_rounds, counts.rounds, now_s)
        self.verified_tokens += sum(counts.verified_by_position)
        self.rounds += counts.rounds
        if counts.proposals and counts.arrived_tokens:
            self._timing.append(counts)
            self._fitted = _fit_timing(self._timing, self._timing_decay)

    @property
    def alpha(self) -> float | None:
        """Maximum-likelihood acceptance of a token given those before it; None until one was verified."""
        return self.acceptance.share

    @property
    def undrafted_share(self) -> float:
        """m, the share of asking rounds to which no usable token came."""
        return self._undrafted.share or 0.0

    @property
    def timing(self) -> DraftTiming | None:
        """Proposal times; None until a proposal arrived."""
        return self._fitted


def _fit_timing(reports: Sequence[RoundCounts], decay: float) -> DraftTiming:
    """Elapsed time regressed on proposal length.

    At a constant length base and slope cannot be told apart: the slope leans towards the drafter's own
    compute time a token (its hold without the queue, from drafters that report no compute time).
    """
    weights = decay ** np.arange(len(reports) - 1, -1, -1)
    sums = np.array(
        [(c.proposals, c.arrived_tokens, c.elapsed_s, c.hold_s, c.queue_s, c.compute_s) for c in reports]
    )
    proposals, tokens, elapsed, hold, queue, compute = weights @ sums
    own = compute if compute > 0.0 else max(0.0, hold - queue)
    root = np.sqrt(weights * sums[:, 0])
    lean = math.sqrt(0.1 * proposals)
    design = np.vstack([np.column_stack([root, root * sums[:, 1] / sums[:, 0]]), [0.0, lean]])
    target = np.append(root * sums[:, 2] / sums[:, 0], lean * own / tokens)
    base, slope = nnls(design, target)[0].tolist()
    round_trip_s = max(0.0, float((elapsed - hold) / proposals))
    return DraftTiming(base, slope, round_trip_s, float(queue / proposals))


def conditional_trials(verified: tuple[int, ...], accepted: tuple[int, ...]) -> float:
    """Accepted tokens plus first rejections: positions verified with all before them accepted.

    Exact at one draft length. With lengths mixed, the rounds that reach position j and verify there are
    estimated as v_j a_(j-1) / v_(j-1): survival does not depend on the length asked.
    """
    trials = 0.0
    reached = 1.0
    for v, a in zip(verified, accepted, strict=True):
        trials += max(v * reached, a)
        reached = a / v if v else 0.0
    return trials
