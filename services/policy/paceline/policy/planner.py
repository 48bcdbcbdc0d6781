"""The draft length of one (verifier, drafter) pair: what the latency model finds best, held steady."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.control import DEFAULT_DRAFT_TOKENS
from paceline.core.errors import ConfigError
from paceline.core.latency import RoundModel, StepTerms
from paceline.core.types import DraftPlan
from paceline.policy.estimates import DraftTiming
from paceline.wire.settings import MAX_DRAFT_TOKENS, Settings

DEFAULT_CONTEXT_TOKENS = 256.0
MEASURED_TOKENS = 64
"""Verified draft tokens before a pair's acceptance is believed."""
HOPELESS_ROUNDS = 256
"""Asking rounds after which a pair that verified fewer tokens counts as one that brings nothing."""
ON_GAIN = 0.03
DWELL_S = 2.0
LENGTH_GAIN = 0.01
"""A new draft length must be this much better than the running one."""
PROBE_S = 0.1
PROBE_STEPS = 2
PROBE_SHARE = 0.05
PROBE_LENGTHS = (1, 2)


@dataclass(frozen=True, slots=True)
class Control:
    """Draft-length rules from the configuration; ``fixed_tokens`` None leaves the choice to the model."""

    enabled: bool = True
    fixed_tokens: int | None = None
    k_max: int = 8
    wait: str = "auto"

    @classmethod
    def from_settings(cls, settings: Settings) -> Control:
        """``control.kind`` goes before ``speculation.k``.

        Raises:
            ConfigError: a control kind that is not available, or a bad ``control.arg``.
        """
        speculation, control = settings.speculation, settings.control
        fixed = None if speculation.k == "auto" else speculation.k
        if control.kind == "fixed":
            if control.arg is None or control.arg not in range(MAX_DRAFT_TOKENS + 1):
                raise ConfigError(
                    f"control.arg: kind 'fixed' needs a whole draft length, 0 to {MAX_DRAFT_TOKENS}"
                )
            fixed = int(control.arg)
        elif control.kind not in ("paceline", "off"):
            raise ConfigError(f"control.kind: {control.kind!r} is not available yet")
        enabled = speculation.enabled and control.kind != "off"
        return cls(enabled, fixed, speculation.k_max, speculation.wait)


@dataclass(frozen=True, slots=True)
class PairView:
    """What is known of a pair at one instant. None: not measured yet."""

    terms: StepTerms | None = None
    running: int = 0
    context_tokens: float = DEFAULT_CONTEXT_TOKENS
    alpha: float | None = None
    verified_tokens: int = 0
    rounds: int = 0
    undrafted_share: float = 0.0
    timing: DraftTiming | None = None

    @property
    def measured(self) -> bool:
        """Whether the model can be asked."""
        enough = self.verified_tokens >= MEASURED_TOKENS or self.rounds >= HOPELESS_ROUNDS
        return self.terms is not None and enough

    def round_model(self, wait: str = "auto", running: int | None = None) -> RoundModel | None:
        """The round at the present load, or with ``running`` sequences; None until steps were measured.

        The longest wait is one plain step, none or unbounded as ``speculation.wait`` says.
        """
        terms = self.terms
        if terms is None:
            return None
        sequences = max(1, self.running if running is None else running)
        plain_s = terms.decode_s(sequences, 0, self.context_tokens)
        timing = self.timing or DraftTiming()
        return RoundModel(
            step_s=lambda k: terms.decode_s(sequences, k, self.context_tokens),
            draft_base_s=timing.base_s,
            draft_token_s=timing.token_s,
            alpha=self.alpha or 0.0,
            undrafted_share=self.undrafted_share,
            max_wait_s={"never": 0.0, "always": math.inf}.get(wait, plain_s),
        )


def longest_timely(model: RoundModel, k_max: int) -> int:
    """The longest draft that arrives within the longest wait.

    Where not even one token does, all lengths stay open: the measured undrafted share then tells what late
    proposals are worth.
    """
    slack_s = model.max_wait_s - model.draft_base_s
    if slack_s < model.draft_token_s:
        return k_max
    return k_max if slack_s >= k_max * model.draft_token_s else int(slack_s / model.draft_token_s)


class PairPlanner:
    """Decides a pair's draft length with hysteresis, dwell and probing; holds the pair's state.

    Probing: while drafting does not pay, 5% of the time with traffic goes at k = 1 or 2 in turn, in spells of
    0.1 s or two steps (so each 2 s when steps are short): acceptance and proposal times stay known.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._drafting: bool | None = None
        self._draft_tokens = 0
        self._switched_at_s = -math.inf
        self._traffic_s = 0.0
        self._probes = 0
        self._planned_at_s: float | None = None

    def plan(self, view: PairView, now_s: float) -> DraftPlan:
        """The plan at ``now_s`` (monotonic seconds), without number and drafter."""
        draft_tokens, reason = self._decide(view, now_s)
        model = view.round_model()
        terms, timing = view.terms or StepTerms(), view.timing or DraftTiming()
        unmeasured = DraftPlan()
        return DraftPlan(
            draft_tokens=draft_tokens,
            max_wait_s=model.max_wait_s if model else unmeasured.max_wait_s,
            step_base_s=terms.base_s,
            step_sequence_s=terms.sequence_s,
            step_token_s=terms.token_s,
            step_query_context_s=terms.query_context_s,
            acceptance=view.alpha or 0.0,
            undrafted_share=view.undrafted_share,
            draft_base_s=timing.base_s,
            draft_token_s=timing.token_s,
            round_trip_s=timing.round_trip_s,
            reason=reason,
        )

    def _decide(self, view: PairView, now_s: float) -> tuple[int, str]:
        control = self._control
        if not control.enabled:
            return 0, "off"
        if control.fixed_tokens is not None:
            return control.fixed_tokens, "fixed"
        model = view.round_model(control.wait)
        if model is None or not view.measured:
            return min(DEFAULT_DRAFT_TOKENS, control.k_max), "measuring"
        elapsed_s = now_s - self._planned_at_s if self._planned_at_s is not None else 0.0
        self._planned_at_s = now_s
        self._choose(model, now_s)
        if self._drafting:
            return self._draft_tokens, "best"
        self._traffic_s += elapsed_s if view.running else 0.0
        probe_s = max(PROBE_S, PROBE_STEPS * model.step_s(0))
        if self._traffic_s >= probe_s / PROBE_SHARE:
            self._traffic_s = 0.0
            self._probes += 1
        if view.running and self._probes and self._traffic_s < probe_s:
            return min(PROBE_LENGTHS[self._probes % len(PROBE_LENGTHS)], control.k_max), "measuring"
        return 0, "not_paying"

    def _choose(self, model: RoundModel, now_s: float) -> None:
        lengths = range(1, longest_timely(model, self._control.k_max) + 1)
        best = min(lengths, key=model.tpot_s)
        gain = model.tpot_s(0) / max(model.tpot_s(best), 1e-12) - 1.0
        if self._drafting is None:
            self._drafting = gain > 0.0
        elif now_s - self._switched_at_s >= DWELL_S and (gain <= 0.0 if self._drafting else gain >= ON_GAIN):
            self._drafting = not self._drafting
            self._switched_at_s = now_s
        keep = self._draft_tokens in lengths and model.tpot_s(self._draft_tokens) <= (
            (1.0 + LENGTH_GAIN) * model.tpot_s(best)
        )
        if not keep:
            self._draft_tokens = best
