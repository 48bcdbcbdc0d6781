"""Asking drafters on behalf of choices, and holding the next step for their answers while that pays."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.core.control import DraftDecision, DraftRule, draft_length, hold_s
from paceline.core.errors import invalid
from paceline.core.latency import expected_tokens
from paceline.core.types import DraftPlan
from paceline.verifier.choice import Choice
from paceline.verifier.link import DrafterLink

OVERDUE_SHARE = 0.25
"""An answer that is overdue is expected after this share of the usual time."""
PATIENCE = 1.5
"""A hold lasts up to this much longer than predicted, since half of all answers come after their mean."""
TIMER_SLACK_S = 0.001


@dataclass(frozen=True, slots=True)
class _Awaited:
    choice: Choice
    link: DrafterLink
    arrives_s: float
    gain: float


class Drafting:
    """Binds each choice to the least loaded ready drafter that it allows, to another one after a loss.

    Args:
        plans: last plan by drafter id.
        wait: ``speculation.wait``.
    """

    def __init__(
        self,
        links: Sequence[DrafterLink],
        plans: Callable[[str], DraftPlan | None],
        *,
        rule: DraftRule,
        wait: str,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.links = links
        self.news = asyncio.Event()
        """Something arrived, or a choice came or went."""
        self._plans = plans
        self._rule = rule
        self._wait = wait
        self._clock = clock
        self._draw = draw
        self._bound: dict[int, DrafterLink] = {}

    def check_drafter(self, name: str) -> None:
        """Raises INVALID_ARGUMENT unless ``name`` is empty, a drafter's id or a kind."""
        known = sorted({n for link in self.links for n in (link.id, link.kind)})
        if name and name not in known:
            raise invalid("speculation.drafter", f"must be one of {', '.join(known) or '(none here)'}")

    def plan(self, choice: Choice) -> DraftPlan | None:
        link = self._link(choice)
        return self._plans(link.id) if link else None

    def link(self, choice: Choice) -> DrafterLink | None:
        """The drafter bound to the choice, lost or not."""
        return self._bound.get(choice.session_id)

    def prepare(self, choice: Choice, room: int) -> None:
        """The choice is new: where drafting is wanted, its drafter begins to read the prompt."""
        choice.decision = self._decide(choice, room)
        link = self._link(choice)
        length = len(choice.sequence.tokens)
        if choice.decision.tokens and link is not None:
            limit = link.sessions.max_context_tokens
            if not limit or length < limit:
                link.sessions.open(choice)

    def ask(self, choice: Choice, room: int) -> None:
        """Decides the next round's draft length and asks for it."""
        decision = self._decide(choice, room)
        choice.asked_tokens = 0
        if decision.tokens:
            link = self._link(choice)
            problem = "no_drafter" if link is None else link.sessions.ask(choice, decision.tokens)
            if problem is None:
                choice.asked_tokens = decision.tokens
                self._note_drafter(choice, link)
            else:
                decision = DraftDecision(0, problem)
        choice.decision = decision

    def lost(self, choice: Choice) -> bool:
        link = self._bound.get(choice.session_id)
        return link is None or not link.ready

    def close(self, choice: Choice) -> None:
        link = self._bound.pop(choice.session_id, None)
        if link is not None:
            link.sessions.close(choice)
        self.news.set()

    async def hold(self, choices: Iterable[Choice], tokens_per_s: float, step_s: float) -> float:
        """Holds for answers to the choices' asks; returns the seconds it took.

        Never longer than the plan's wait and one plain step; with ``always`` until every ask is answered or
        its drafter is lost.
        """
        if self._wait == "never":
            return 0.0
        began_s = self._clock()
        awaited = self._awaited(choices, began_s)
        limit_s: float | None = None
        if self._wait == "auto":
            awaited = [a for a in awaited if a.link.responsive and a.link.expected_s > 0.0]
            plans = [plan.max_wait_s for a in awaited if (plan := self._plans(a.link.id)) is not None]
            limit_s = min([step_s, max(plans, default=DraftPlan().max_wait_s)])
            until_s = hold_s(((a.arrives_s, a.gain) for a in awaited), tokens_per_s, limit_s)
            awaited = [a for a in awaited if a.arrives_s <= until_s] if until_s > 0.0 else []
            limit_s = min(limit_s, PATIENCE * until_s + TIMER_SLACK_S)
        if not awaited:
            return 0.0
        try:
            async with asyncio.timeout(limit_s):
                while awaited := [a for a in awaited if self._outstanding(a)]:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            for missing in awaited:
                missing.link.responsive = False
        return self._clock() - began_s

    def _awaited(self, choices: Iterable[Choice], now_s: float) -> list[_Awaited]:
        awaited = []
        for choice in choices:
            link = self._bound.get(choice.session_id)
            if not choice.asked_tokens or link is None or not link.ready:
                continue
            expected_in_s = link.expected_in_s(choice, now_s)
            if expected_in_s is None:
                continue
            plan = self._plans(link.id)
            alpha = plan.acceptance if plan and plan.acceptance > 0.0 else link.acceptance
            gain = expected_tokens(alpha, choice.asked_tokens) - 1.0
            arrives_s = max(expected_in_s, OVERDUE_SHARE * link.expected_s)
            awaited.append(_Awaited(choice, link, arrives_s, gain))
        return awaited

    def _outstanding(self, awaited: _Awaited) -> bool:
        return awaited.link.ready and awaited.link.expected_in_s(awaited.choice, self._clock()) is not None

    def _decide(self, choice: Choice, room: int) -> DraftDecision:
        speculation = choice.speculation
        return draft_length(
            self._rule,
            self.plan(choice),
            enabled=speculation.enabled,
            max_draft_tokens=speculation.max_draft_tokens,
            tokens_left=room,
            draw=self._draw(),
        )

    def _link(self, choice: Choice) -> DrafterLink | None:
        bound = self._bound.get(choice.session_id)
        if bound is not None and bound.ready:
            return bound
        wanted = choice.speculation.drafter
        ready = [link for link in self.links if link.ready and wanted in ("", link.id, link.kind)]
        if not ready:
            return None
        load = Counter(link.id for link in self._bound.values())
        self._bound[choice.session_id] = best = min(ready, key=lambda link: load[link.id])
        return best

    def _note_drafter(self, choice: Choice, link: DrafterLink | None) -> None:
        if link is not None and (link.id, link.kind) not in choice.receipt.drafters:
            choice.receipt.drafters.append((link.id, link.kind))
