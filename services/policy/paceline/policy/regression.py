"""Step times of one worker: a sliding-window regression on what each step held, and its speed now."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls  # type: ignore[import-untyped]

from paceline.core.latency import StepTerms
from paceline.core.types import StepRecord

Array = npt.NDArray[np.float64]

MIN_FIT_RECORDS = 32
PRIOR_DEVIATION = 0.3
"""Of each term but the constant, around 0, as a share of a step: terms that the data cannot tell apart (one
draft length, one batch size) share their cost instead of blowing up."""
NOISE = 0.05
NOISE_FLOOR = 0.01
"""Relative deviation of step times assumed for the first pass; the least for the second."""
OUTLIER_SIGMAS = 5.0
_SECONDS_FLOOR = 1e-7


def fit_nonnegative(x: Array, y: Array) -> Array:
    """Coefficients >= 0 with x c ~ y in relative error; column 0 is the constant.

    The constant is not shrunk: what the data cannot tell apart from it is taken to be load-independent,
    which errs towards trying longer drafts, whose steps then tell. Records further than five deviations
    (1.4826 MAD) from the median relative residual are left out of the second pass.
    """
    y = np.maximum(y, _SECONDS_FLOOR)
    first = _solve(x, y, 1.0 / y, NOISE)
    fitted = np.maximum(x @ first, _SECONDS_FLOOR)
    residual = y / fitted - 1.0
    deviation = np.abs(residual - np.median(residual))
    noise = max(1.4826 * float(np.median(deviation)), NOISE_FLOOR)
    inlier = deviation <= OUTLIER_SIGMAS * noise
    return _solve(x[inlier], y[inlier], 1.0 / fitted[inlier], noise)


def _solve(x: Array, y: Array, weight: Array, noise: float) -> Array:
    rows = x * weight[:, None]
    scale = np.sqrt(np.mean(rows**2, axis=0))
    scale[scale == 0.0] = 1.0
    shrink = np.full(x.shape[1], noise / PRIOR_DEVIATION)
    shrink[0] = 0.0
    design = np.vstack([rows / scale, np.diag(shrink)])
    target = np.concatenate([y * weight, np.zeros(x.shape[1])])
    solution: Array = nnls(design, target)[0] / scale
    return solution


class StepTimes:
    """What a worker's steps cost: a long-run fit, times how slow the last steps were against it.

    The window is bounded in records and age, and takes at most ``rate_per_s`` records once ``burst_records``
    are in: so its memory is minutes at any step rate, and a throttled worker shows as a slowdown until it
    has been slow for most of the window.
    """

    def __init__(
        self,
        *,
        window_records: int = 4096,
        window_s: float = 600.0,
        rate_per_s: float = 8.0,
        burst_records: int = 1024,
        recent_records: int = 32,
        refit_s: float = 0.5,
    ) -> None:
        self._features = np.zeros((window_records, 5))
        self._seconds = np.zeros(window_records)
        self._times_s = np.full(window_records, -np.inf)
        self._next = 0
        self._window_s = window_s
        self._rate_per_s = rate_per_s
        self._burst = float(burst_records)
        self._allowance = float(burst_records)
        self._allowance_at_s: float | None = None
        self._recent: deque[tuple[Array, float]] = deque(maxlen=recent_records)
        self._decode_context: deque[tuple[int, int]] = deque(maxlen=recent_records)
        self._refit_s = refit_s
        self._fitted_at_s = -np.inf
        self._stale = False
        self._coefficients: Array | None = None
        self._slowdown = 1.0
        self.refits = 0

    def add(self, steps: Sequence[StepRecord], now_s: float) -> None:
        """Takes valid records (`reports` checks them), oldest first."""
        if not steps:
            return
        features = np.array([_features(step) for step in steps])
        seconds = np.array([step.seconds for step in steps])
        self._recent.extend(zip(features, seconds.tolist(), strict=True))
        self._decode_context.extend(
            (step.query_context, step.query_tokens) for step in steps if not step.prefill_tokens
        )
        for i in self._admitted(len(steps), now_s):
            self._features[self._next] = features[i]
            self._seconds[self._next] = seconds[i]
            self._times_s[self._next] = now_s
            self._next = (self._next + 1) % len(self._seconds)
        self._stale = True

    def _admitted(self, count: int, now_s: float) -> npt.NDArray[np.intp]:
        """Evenly spaced indices of the records that the rate lets into the window."""
        idle_s = now_s - self._allowance_at_s if self._allowance_at_s is not None else 0.0
        self._allowance_at_s = now_s
        self._allowance = min(self._burst, self._allowance + idle_s * self._rate_per_s)
        admitted = min(count, int(self._allowance))
        self._allowance -= admitted
        return np.linspace(0, count - 1, admitted).astype(np.intp)

    def _refit(self, now_s: float) -> None:
        if not self._stale or now_s - self._fitted_at_s < self._refit_s:
            return
        self._stale = False
        self._fitted_at_s = now_s
        live = self._times_s >= now_s - self._window_s
        if np.count_nonzero(live) >= MIN_FIT_RECORDS:
            self._coefficients = fit_nonnegative(self._features[live], self._seconds[live])
            self.refits += 1
        if self._coefficients is not None:
            fitted = np.array([row for row, _ in self._recent]) @ self._coefficients
            seconds = np.array([seconds for _, seconds in self._recent])
            self._slowdown = float(np.median(seconds / np.maximum(fitted, _SECONDS_FLOOR)))

    def terms(self, now_s: float) -> StepTerms | None:
        """The terms at the present speed; None until enough steps were seen."""
        self._refit(now_s)
        if self._coefficients is None:
            return None
        return StepTerms(*self._coefficients.tolist()).scaled(self._slowdown)

    def slowdown(self, now_s: float) -> float:
        """Median of seconds over the long-run fit in the last steps; 1 until known."""
        self._refit(now_s)
        return self._slowdown

    @property
    def context_tokens(self) -> float | None:
        """Mean context of a decoded token in the last steps without prefill; None until one was seen."""
        tokens = sum(tokens for _, tokens in self._decode_context)
        return sum(context for context, _ in self._decode_context) / tokens if tokens else None


def _features(step: StepRecord) -> tuple[float, float, float, float, float]:
    decode_tokens = step.query_tokens - step.prefill_tokens
    return (1.0, step.sequences, decode_tokens, step.query_context, step.prefill_tokens)
