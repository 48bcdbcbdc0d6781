"""The fleet as workers report it: who is there, what each costs, which pairs to use and how."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.latency import Workload
from paceline.core.types import DraftPlan, WorkerRole, WorkerState
from paceline.policy.estimates import PairEstimates
from paceline.policy.planner import DEFAULT_CONTEXT_TOKENS, Control, PairPlanner, PairView
from paceline.policy.predictions import Explanation, Prediction, explain, predict
from paceline.policy.regression import StepTimes
from paceline.policy.reports import Report

DEFAULT_TOKENS = 128
"""Prompt and output length assumed until requests have finished."""
MAX_WORKERS = 4096
_MEMORY_REQUESTS = 0.98


@dataclass(slots=True)
class Worker:
    """One worker as last reported. ``link`` is the stream that reports it; None once that ended."""

    id: str
    report: Report
    link: object | None
    reported_at_s: float
    steps: StepTimes
    retired: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    drafters_seen: set[str] = field(default_factory=set)
    prompt_tokens: float = DEFAULT_TOKENS
    output_tokens: float = DEFAULT_TOKENS

    def restart(self, report: Report, steps: StepTimes) -> None:
        """The worker's process is a new one: nothing measured of the old one holds."""
        self.retired.append(self.report.incarnation)
        self.steps = steps
        self.drafters_seen.clear()


@dataclass(slots=True)
class Pair:
    estimates: PairEstimates
    planner: PairPlanner
    plan: DraftPlan


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    id: str
    role: WorkerRole
    state: WorkerState
    pid: int
    running: int
    sessions: int
    blocks_used: int
    slowdown_observed: float
    alpha: float | None
    last_report_age_s: float


@dataclass(frozen=True, slots=True)
class PairStatus:
    """Weights add up to 1 over usable pairs; drafter "" stands for a verifier without any drafter."""

    verifier_id: str
    drafter_id: str
    weight: float
    draft_tokens: int
    predicted_tpot_s: float


class Fleet:
    """All state of the policy. Every method is plain computation; ``clock`` is monotonic seconds.

    Args:
        drafters: configured drafter ids, planned for before they report.
        chunk_tokens: longest prefill chunk.
        silence_s: a worker is lost after this long without a report.
        forget_s: a lost worker leaves the table after this long.
    """

    def __init__(
        self,
        control: Control,
        *,
        clock: Callable[[], float],
        drafters: Iterable[str] = (),
        chunk_tokens: int = 512,
        silence_s: float = 3.0,
        forget_s: float = 600.0,
    ) -> None:
        self._control = control
        self._clock = clock
        self._drafters = tuple(drafters)
        self._chunk_tokens = chunk_tokens
        self._silence_s = silence_s
        self._forget_s = forget_s
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._plan_number = 0
        self._planned_at_s = clock()
        self._status: tuple[PairStatus, ...] = ()
        self.workers: dict[str, Worker] = {}
        self.reports: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        """Finished requests by SLO class."""
        self.plans: Counter[str] = Counter()

    def observe(self, report: Report, link: object) -> bool:
        """Takes one report of the stream ``link``; False (and counted) if it is not the worker's newest."""
        now_s = self._clock()
        worker = self.workers.get(report.worker_id)
        if worker is None:
            if len(self.workers) >= MAX_WORKERS:
                self.ignored["too_many_workers"] += 1
                return False
            worker = self.workers[report.worker_id] = Worker(
                report.worker_id, report, link, now_s, StepTimes()
            )
        elif report.incarnation in worker.retired:
            self.ignored["stale_incarnation"] += 1
            return False
        elif report.incarnation != worker.report.incarnation:
            worker.restart(report, StepTimes())
            self._forget_pairs(report.worker_id)
        elif report.number <= worker.report.number:
            self.ignored["out_of_order"] += 1
            return False
        worker.report, worker.link, worker.reported_at_s = report, link, now_s
        self.reports[report.worker_id] += 1
        worker.steps.add(report.steps, now_s)
        if report.role is WorkerRole.VERIFIER:
            for drafter_id, counts in report.drafts:
                if drafter_id not in worker.drafters_seen and len(worker.drafters_seen) >= MAX_WORKERS:
                    self.ignored["too_many_drafters"] += 1
                    continue
                worker.drafters_seen.add(drafter_id)
                self._pair(worker.id, drafter_id).estimates.add(counts, now_s)
        for request in report.requests:
            self.requests[request.slo_class] += 1
            kept = _MEMORY_REQUESTS
            worker.prompt_tokens += (1 - kept) * (request.prompt_tokens - worker.prompt_tokens)
            worker.output_tokens += (1 - kept) * (request.output_tokens - worker.output_tokens)
        return True

    def stream_ended(self, link: object) -> None:
        """The workers whose newest report came by this stream are lost until they report again."""
        for worker in self.workers.values():
            if worker.link is link:
                worker.link = None

    def state(self, worker: Worker) -> WorkerState:
        silent = self._clock() - worker.reported_at_s > self._silence_s
        return WorkerState.LOST if silent or worker.link is None else worker.report.state

    def replan(self) -> None:
        """Decides every pair anew at the present load, and the routing weights."""
        now_s = self._clock()
        for worker_id in [w.id for w in self.workers.values() if now_s - w.reported_at_s > self._forget_s]:
            del self.workers[worker_id]
            del self.reports[worker_id]
            self._forget_pairs(worker_id)
        for verifier in self._verifiers():
            for drafter_id in self._drafters_of(verifier):
                pair = self._pair(verifier.id, drafter_id)
                fresh = pair.planner.plan(self._view(verifier, drafter_id), now_s)
                if replace(fresh, plan=pair.plan.plan, drafter_id=drafter_id) != pair.plan:
                    self._plan_number += 1
                    pair.plan = replace(fresh, plan=self._plan_number, drafter_id=drafter_id)
                    self.plans[fresh.reason] += 1
        self._status = self._weigh()
        self._planned_at_s = now_s

    def plans_for(self, verifier_id: str) -> tuple[DraftPlan, ...]:
        """The last plans of a verifier, by drafter id."""
        return tuple(pair.plan for (v, _), pair in sorted(self._pairs.items()) if v == verifier_id)

    @property
    def pairs(self) -> tuple[PairStatus, ...]:
        return self._status

    @property
    def plan_age_s(self) -> float:
        return self._clock() - self._planned_at_s

    def statuses(self) -> list[WorkerStatus]:
        now_s = self._clock()
        return [
            WorkerStatus(
                w.id,
                w.report.role,
                self.state(w),
                w.report.pid,
                w.report.running,
                w.report.sessions,
                w.report.blocks_used,
                w.steps.slowdown(now_s),
                self._pooled_alpha(w),
                now_s - w.reported_at_s,
            )
            for w in self.workers.values()
        ]

    def predict(self, prompt_tokens: int, output_tokens: int, verifier_id: str = "") -> Prediction | None:
        """Latencies of one more request on a verifier, by default the one with the most weight.

        Raises:
            PacelineError: NOT_FOUND, no such verifier.
        """
        if verifier_id:
            self._verifier(verifier_id)
        pairs = [p for p in self._status if verifier_id in ("", p.verifier_id) and p.weight > 0.0]
        if not pairs:
            return None
        best = max(pairs, key=lambda pair: pair.weight)
        verifier = self._verifier(best.verifier_id)
        return predict(
            self._view(verifier, best.drafter_id),
            self._control,
            best.draft_tokens,
            self._work(verifier, prompt_tokens, output_tokens),
            waiting=verifier.report.waiting,
            max_sequences=verifier.report.max_sequences,
        )

    def explain(
        self, verifier_id: str, drafter_id: str, prompt_tokens: int = 0, output_tokens: int = 0
    ) -> Explanation:
        """Why a pair drafts as it does; lengths of 0 stand for the mean finished request.

        Raises:
            PacelineError: NOT_FOUND, no such pair.
        """
        verifier = self._verifier(verifier_id)
        pair = self._pairs.get((verifier_id, drafter_id))
        if pair is None:
            raise PacelineError(
                ErrorKind.NOT_FOUND, f"drafter: no pair {verifier_id}, {drafter_id}", field="drafter"
            )
        work = self._work(verifier, prompt_tokens, output_tokens)
        return explain(self._view(verifier, drafter_id), self._control, pair.plan, work)

    def _verifiers(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.report.role is WorkerRole.VERIFIER]

    def _verifier(self, verifier_id: str) -> Worker:
        worker = self.workers.get(verifier_id)
        if worker is None or worker.report.role is not WorkerRole.VERIFIER:
            raise PacelineError(
                ErrorKind.NOT_FOUND, f"verifier: no verifier {verifier_id!r}", field="verifier"
            )
        return worker

    def _drafters_of(self, verifier: Worker) -> list[str]:
        reporting = {w.id for w in self.workers.values() if w.report.role is WorkerRole.DRAFTER}
        return sorted(reporting | verifier.drafters_seen | set(self._drafters))

    def _pair(self, verifier_id: str, drafter_id: str) -> Pair:
        key = (verifier_id, drafter_id)
        if key not in self._pairs:
            self._pairs[key] = Pair(PairEstimates(), PairPlanner(self._control), DraftPlan())
        return self._pairs[key]

    def _forget_pairs(self, worker_id: str) -> None:
        for key in [key for key in self._pairs if worker_id in key]:
            del self._pairs[key]

    def _view(self, verifier: Worker, drafter_id: str) -> PairView:
        context = verifier.steps.context_tokens
        common = PairView(
            terms=verifier.steps.terms(self._clock()),
            running=verifier.report.running,
            context_tokens=DEFAULT_CONTEXT_TOKENS if context is None else context,
        )
        pair = self._pairs.get((verifier.id, drafter_id))
        if pair is None:
            return common
        estimates = pair.estimates
        return replace(
            common,
            alpha=estimates.alpha,
            verified_tokens=estimates.verified_tokens,
            rounds=estimates.rounds,
            undrafted_share=estimates.undrafted_share,
            timing=estimates.timing,
        )

    def _usable(self, verifier: Worker, drafter_id: str) -> bool:
        if self.state(verifier) is not WorkerState.READY:
            return False
        drafter = self.workers.get(drafter_id)
        if drafter is not None:
            return self.state(drafter) is WorkerState.READY
        return drafter_id == "" or drafter_id in verifier.drafters_seen

    def _weigh(self) -> tuple[PairStatus, ...]:
        """Inverse predicted TPOT; a pair not measured yet weighs as the mean of the others."""
        rows: list[tuple[str, str, bool, int, float]] = []
        for verifier in self._verifiers():
            for drafter_id in self._drafters_of(verifier) or [""]:
                pair = self._pairs.get((verifier.id, drafter_id))
                k = pair.plan.draft_tokens if pair else 0
                model = self._view(verifier, drafter_id).round_model(self._control.wait)
                tpot_s = model.tpot_s(k) if model else 0.0
                rows.append((verifier.id, drafter_id, self._usable(verifier, drafter_id), k, tpot_s))
        known = [1.0 / tpot_s for *_, usable, _, tpot_s in rows if usable and tpot_s > 0.0]
        mean = sum(known) / len(known) if known else 1.0
        speeds = [
            (1.0 / tpot_s if tpot_s > 0.0 else mean) if usable else 0.0 for *_, usable, _, tpot_s in rows
        ]
        total = sum(speeds) or 1.0
        return tuple(
            PairStatus(v, d, speed / total, k, tpot_s)
            for (v, d, _, k, tpot_s), speed in zip(rows, speeds, strict=True)
        )

    def _pooled_alpha(self, worker: Worker) -> float | None:
        shares = [pair.estimates.acceptance for key, pair in self._pairs.items() if worker.id in key]
        trials = sum(share.whole for share in shares)
        return min(1.0, sum(share.part for share in shares) / trials) if trials > 0.0 else None

    def _work(self, verifier: Worker, prompt_tokens: int, output_tokens: int) -> Workload:
        return Workload(
            prompt_tokens or round(verifier.prompt_tokens) or 1,
            output_tokens or round(verifier.output_tokens) or 1,
            self._chunk_tokens,
        )
