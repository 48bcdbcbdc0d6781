"""The step loop: drafts in, one forward, committed tokens out, asks for the next drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.sampling import accepted_length
from paceline.core.types import FinishReason, StepRecord
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import ItemResult, Runner, StepItem, StepPlan
from paceline.v1 import policy_pb2
from paceline.verifier.choice import Choice
from paceline.verifier.drafting import Drafting
from paceline.verifier.reports import Reports
from paceline.verifier.rounds import settle, synthetic_length
from paceline.wire.metrics import EngineMetrics
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)

QUEUE_FACTOR = 4
"""Choices taken at most, running and waiting, as a multiple of ``max_sequences``."""
SMOOTHING = 0.1


class _Pace:
    """Smoothed step seconds without prefill, and committed tokens a second."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def step(self, plan: StepPlan, seconds: float) -> None:
        if not plan.prefill_tokens:
            self.step_s += (seconds - self.step_s) * (SMOOTHING if self.step_s else 1.0)

    def cycle(self, tokens: int, seconds: float) -> None:
        self._tokens += SMOOTHING * (tokens - self._tokens)
        self._seconds += SMOOTHING * (seconds - self._seconds)


class StepLoop:
    """Owns the running choices. Call everything on the event loop; only `run` and `idle` wait.

    Args:
        executor: of one thread, in which steps are computed.
        broken: called once if the runner fails; nothing is taken afterwards.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        drafting: Drafting,
        *,
        executor: Executor,
        max_sequences: int,
        reports: Reports,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        synthetic_acceptance: float | None = None,
        integrity_check: bool = False,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.synthetic_acceptance = synthetic_acceptance
        self._runner = runner
        self._drafting = drafting
        self._executor = executor
        self._max_choices = QUEUE_FACTOR * max_sequences
        self._reports = reports
        self._metrics = metrics
        self._clock = clock
        self._integrity_check = integrity_check
        self._on_broken = broken
        self._choices: dict[int, Choice] = {}
        self._leaving: list[Choice] = []
        self._executing = False
        self._failed: PacelineError | None = None
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pace = _Pace()

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    def submit(self, choice: Choice) -> None:
        """Takes a new choice.

        Raises:
            PacelineError: UNAVAILABLE after a failure, OVERLOADED, or CONTEXT_LENGTH_EXCEEDED.
        """
        if self._failed is not None:
            raise self._failed
        if len(self._choices) >= self._max_choices:
            raise PacelineError(
                ErrorKind.OVERLOADED,
                f"verifier: at most {self._max_choices} choices at once",
                retry_after_s=1.0,
            )
        self.scheduler.add(choice.sequence)
        self._choices[choice.sequence.id] = choice
        self._drafting.prepare(choice, self.scheduler.room(choice.sequence))
        self._idle.clear()
        self._work.set()

    def leave(self, choice: Choice) -> None:
        """Frees all that a choice holds, at the latest when the running step ends. Unknown ones are fine."""
        if self._choices.pop(choice.sequence.id, None) is None:
            return
        self._drafting.close(choice)
        if self._executing:
            # The runner reads block tables in its thread.
            self._leaving.append(choice)
        else:
            self.scheduler.remove(choice.sequence)
        if not self._choices:
            self._work.set()

    def cancel(self, choice: Choice) -> None:
        """Ends a choice as cancelled, its receipt included."""
        if choice.sequence.id in self._choices:
            choice.finish(FinishReason.CANCELLED, None, self._clock())
            self.leave(choice)

    def fail(self, choice: Choice, error: PacelineError) -> None:
        if choice.sequence.id in self._choices:
            choice.fail(error)
            self.leave(choice)

    async def idle(self) -> None:
        """Returns once no choice is left."""
        await self._idle.wait()

    async def run(self) -> None:
        """Steps until cancelled; a failure of the runner ends all choices."""
        reason = "verifier: stopped"
        try:
            while True:
                if self._choices:
                    await self._step()
                    continue
                self._rest()
                self._work.clear()
                await self._work.wait()
        except Exception as error:  # noqa: BLE001 - the loop's boundary: logged, and all requests are told
            _log.exception("engine_failed")
            reason = f"verifier: the engine failed ({type(error).__name__})"
            self._on_broken()
        finally:
            self._executing = False
            self._failed = PacelineError(ErrorKind.UNAVAILABLE, reason)
            for choice in self.choices:
                self.fail(choice, self._failed)
            self._rest()

    def _rest(self) -> None:
        self._remove_leaving()
        self._idle.set()
        if self._integrity_check:
            self.scheduler.check_integrity()

    async def _step(self) -> None:
        began_s = self._clock()
        decoding = [c for c in self._choices.values() if self.scheduler.decoding(c.sequence)]
        drafts = {c.sequence.id: draft for c in decoding if (draft := self._usable_draft(c))}
        preemptions = self.scheduler.preemptions
        plan = self.scheduler.plan(drafts)
        self._metrics.preemptions.inc(self.scheduler.preemptions - preemptions)
        planned_s = self._clock()
        for item in plan.items:
            self._begin(item, planned_s)
        self._executing = True
        try:
            results = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._runner.execute, plan
            )
        finally:
            self._executing = False
        executed_s = self._clock()
        seconds = executed_s - planned_s
        self._reports.steps.append(
            StepRecord(plan.sequences, plan.query_tokens, plan.prefill_tokens, plan.query_context, seconds)
        )
        self._pace.step(plan, seconds)
        committed = sum(
            self._end(item, result, seconds, executed_s)
            for item, result in zip(plan.items, results, strict=True)
        )
        self._remove_leaving()
        asking = []
        for item in plan.items:
            choice = self._choices.get(item.sequence.id)
            if choice is not None and item.samples:
                self._drafting.ask(choice, self.scheduler.room(choice.sequence))
                asking.append(choice)
        settled_s = self._clock()
        held_s = await self._drafting.hold(asking, self._pace.tokens_per_s, self._pace.step_s)
        if held_s:
            for choice in asking:
                choice.waited_s += held_s if choice.asked_tokens else 0.0
        self._pace.cycle(committed, self._clock() - began_s)
        part = self._metrics.step_seconds
        part.labels("plan").observe(planned_s - began_s)
        part.labels("forward").observe(seconds)
        part.labels("commit").observe(settled_s - executed_s)
        part.labels("hold").observe(held_s)

    def _usable_draft(self, choice: Choice) -> Sequence[int]:
        pending = choice.inbox.pending
        draft = choice.inbox.peek()
        if pending is not None and not draft:
            self._metrics.stale_frames.labels("overtaken").inc()
        return draft

    def _begin(self, item: StepItem, now_s: float) -> None:
        choice = self._choices[item.sequence.id]
        choice.begin_step(now_s)
        if not item.samples:
            return
        if len(item.token_ids) - len(item.draft) == 1 and choice.receipt.rounds:
            choice.feed(item.draft, drafter_lost=self._drafting.lost(choice))
        else:
            choice.begin_plain_round()

    def _end(self, item: StepItem, result: ItemResult, seconds: float, now_s: float) -> int:
        """Settles one item; returns the number of tokens committed."""
        choice = self._choices.get(item.sequence.id)
        if choice is None:
            return 0
        if choice.times.first_token_s is None:
            choice.times.prefill_s += seconds
        else:
            choice.times.verify_s += seconds
        if result.error is not None:
            self.fail(choice, PacelineError(ErrorKind.INTERNAL, f"verifier: {result.error}"))
            return 0
        if not item.samples:
            self.scheduler.commit(item, ())
            return 0
        return self._settle(choice, item, result, now_s)

    def _settle(self, choice: Choice, item: StepItem, result: ItemResult, now_s: float) -> int:
        if self.synthetic_acceptance is None:
            accepted = accepted_length(item.draft, result.chosen)
        else:
            key, position = choice.synthetic_key(), choice.output_tokens
            accepted = synthetic_length(item.draft, self.synthetic_acceptance, key, position)
            choice.receipt.synthetic = True
        outcome = settle(
            item.draft,
            result.chosen,
            accepted,
            stop_ids=choice.stop_ids,
            stops_from=choice.stops_from,
            room=self.scheduler.room(choice.sequence),
        )
        asked, waited_s = choice.asked_tokens, choice.waited_s
        self.scheduler.commit(item, outcome.new_tokens)
        choice.settle(outcome, result, now_s)
        link = self._drafting.link(choice)
        if link is not None:
            tally = self._reports.drafter(link.id, link.kind)
            tally.round(asked, outcome.verified, outcome.accepted, waited_s)
            link.verified(outcome.verified, outcome.accepted)
        metrics = self._metrics
        metrics.draft_length.observe(outcome.verified)
        if outcome.verified:
            metrics.drafts.inc()
            metrics.draft_tokens.inc(outcome.verified)
            metrics.accepted_tokens.inc(outcome.accepted)
            for index in range(outcome.accepted):
                metrics.accepted_at(index)
        if outcome.finish is not None:
            choice.finish(outcome.finish, outcome.stop_token_id, now_s)
            self._record(choice)
            self.leave(choice)
        return len(outcome.new_tokens)

    def _record(self, choice: Choice) -> None:
        observed = choice.receipt.observed
        self._reports.requests.append(
            policy_pb2.RequestRecord(
                prompt_tokens=choice.sequence.prompt_tokens,
                output_tokens=choice.output_tokens,
                ttft_s=observed.ttft_ms * 1e-3,
                e2e_s=observed.e2e_ms * 1e-3,
                slo_class=choice.slo_class.name,
            )
        )

    def _remove_leaving(self) -> None:
        for choice in self._leaving:
            self.scheduler.remove(choice.sequence)
        self._leaving.clear()
