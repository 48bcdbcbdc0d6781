"""The path every request takes, whichever API it came by: slot, checks, queue, output, record."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from paceline.core.errors import ErrorKind, PacelineError, invalid
from paceline.core.types import SamplingParams, SloClass, SpeculationOptions, Usage
from paceline.gateway.dispatch import RETRY_AFTER_S, Dispatcher
from paceline.gateway.fleet import Expected, Fleet
from paceline.gateway.policy_link import PolicyLink
from paceline.gateway.queue import AdmissionQueue
from paceline.gateway.request import Choice, GatewayRequest, Job
from paceline.gateway.tokenizer import TextCodec, context_exceeded
from paceline.wire.metrics import RequestMetrics
from paceline.wire.settings import Settings

KEPT_FINISHED = 512
"""Finished requests that can still be asked about."""
EXPECTED_OUTPUT_TOKENS = 512
"""Admission counts this much where the request names no max_tokens."""
DRAIN_RETRY_AFTER_S = 5.0
DEFAULT_TENANT = "default"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def request_id(given: str, field: str) -> str:
    """``given`` if it is well-formed, a new one if it is empty."""
    if not given:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(given):
        raise invalid(field, "must be 1 to 128 characters of [A-Za-z0-9_.:-]")
    return given


class Gateway:
    """Everything the APIs share."""

    def __init__(
        self,
        settings: Settings,
        expected: Expected,
        fleet: Fleet,
        policy: PolicyLink,
        queue: AdmissionQueue,
        metrics: RequestMetrics,
    ) -> None:
        self.settings = settings
        self.model = settings.model.served_name
        self.files = expected.files
        self.codec = TextCodec(expected.files)
        self.fleet = fleet
        self.policy = policy
        self.queue = queue
        self.metrics = metrics
        self.created_s = int(time.time())
        self.system_fingerprint = f"fp_{expected.files.tokenizer_fingerprint[:12]}"
        self.draining = False
        self.finished: OrderedDict[str, GatewayRequest] = OrderedDict()
        self.open_calls: dict[str, list[str]] = {}
        """Ids of the requests of every API call that is being answered, by the id its client knows."""
        self.dispatcher = Dispatcher(
            queue,
            fleet,
            policy,
            lease_s=settings.queue.lease_s,
            on_tokens=self._on_tokens,
            on_finished=self._on_finished,
        )
        metrics.running.set_function(lambda: len(self.dispatcher.running_ids))
        metrics.waiting.set_function(lambda: len(self.dispatcher.live) - len(self.dispatcher.running_ids))
        metrics.leases.set_function(lambda: len(self.dispatcher.running_ids))
        self._classes = {c.name: SloClass(c.name, c.ttft_ms, c.tpot_ms, c.priority) for c in settings.classes}

    @property
    def accepting(self) -> bool:
        return not self.draining and bool(self.fleet.ready)

    def check_model(self, name: str) -> None:
        """Raises PacelineError MODEL_NOT_FOUND for any other model."""
        if name != self.model:
            raise PacelineError(
                ErrorKind.MODEL_NOT_FOUND,
                f"model: {name!r} is not served here, {self.model!r} is",
                field="model",
            )

    def slo_class(self, name: str, field: str) -> SloClass:
        """A configured class; empty is ``default``, or the first one where none has that name."""
        if not name:
            return self._classes.get("default") or next(iter(self._classes.values()), SloClass())
        if name not in self._classes:
            raise invalid(field, f"must be one of: {', '.join(sorted(self._classes)) or 'auto, default'}")
        return self._classes[name]

    def session(self, base_id: str, prompts: int, choices: int) -> Session:
        """Slots for ``prompts`` requests of ``choices`` choices each; use as an async context manager."""
        ids = [base_id] if prompts == 1 else [f"{base_id}-{i}" for i in range(prompts)]
        return Session(self, base_id, ids, choices)

    def check_speculation(self, options: SpeculationOptions) -> None:
        known = {name for drafter in self.settings.drafters for name in (drafter.id, drafter.kind)}
        if options.drafter and options.drafter not in known:
            raise invalid("speculation.drafter", f"must be one of: {', '.join(sorted(known)) or '(none)'}")

    def job(
        self,
        job_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        speculation: SpeculationOptions,
        slo: SloClass,
        *,
        field: str,
        priority: int | None = None,
        caller_timeout_s: float | None = None,
    ) -> Job:
        """The complete request; raises PacelineError if the prompt is empty or does not fit."""
        if not prompt_token_ids:
            raise invalid(field, "must not be empty")
        prompt_tokens, context = len(prompt_token_ids), self.fleet.max_context_tokens
        left = context - prompt_tokens
        if left < (sampling.max_tokens or 1):
            raise context_exceeded(field, prompt_tokens, sampling.max_tokens, context)
        output_tokens = sampling.max_tokens or min(left, EXPECTED_OUTPUT_TOKENS)
        timeout_s = self.settings.gateway.queue_timeout_s
        if caller_timeout_s is not None:
            timeout_s = min(timeout_s, caller_timeout_s)
        return Job(
            request_id=job_id,
            model=self.model,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=replace(
                sampling,
                seed=secrets.randbits(53) if sampling.seed is None else sampling.seed,
                max_tokens=sampling.max_tokens or left,
            ),
            speculation=speculation,
            slo=slo,
            tenant=DEFAULT_TENANT,
            priority=slo.priority if priority is None else priority,
            timeout_s=timeout_s,
            caller_timeout_s=caller_timeout_s,
            kv_tokens=sampling.n * (prompt_tokens + output_tokens),
        )

    def cancel(self, base_id: str) -> bool:
        """Ends a live request by the id its client knows; False if there is none."""
        live = self.dispatcher.live
        found = [live[key] for key in self.open_calls.get(base_id, ()) if key in live]
        for request in found:
            self.dispatcher.cancel(request)
        return bool(found)

    def _on_tokens(
        self, request: GatewayRequest, choice: Choice, tokens: int, before_s: float | None
    ) -> None:
        metrics, now = self.metrics, time.monotonic()
        metrics.generation_tokens.inc(tokens)
        if before_s is None:
            metrics.ttft.observe(now - request.arrival_s)
        else:
            # Tokens of one round arrive together: each took its share of the round.
            for _ in range(tokens):
                metrics.itl.observe((now - before_s) / tokens)

    def _on_finished(self, request: GatewayRequest) -> None:
        metrics, job = self.metrics, request.job
        self.finished[job.request_id] = request
        while len(self.finished) > KEPT_FINISHED:
            self.finished.popitem(last=False)
        if request.error is not None:
            metrics.errors.labels(request.error.kind.value).inc()
            for choice in request.choices:
                if choice.finish is None:
                    choice.observe(job, request.arrival_s, request.dispatch_s, request.predicted)
            return
        metrics.e2e.observe(time.monotonic() - request.arrival_s)
        metrics.prompt_tokens.inc(len(job.prompt_token_ids))
        for choice in request.choices:
            metrics.success(str(choice.finish))
            seen, slo = choice.receipt.observed, job.slo
            attained = (not slo.ttft_ms or seen.ttft_ms <= slo.ttft_ms) and (
                not slo.tpot_ms or seen.tpot_ms <= slo.tpot_ms
            )
            (metrics.slo_attained if attained else metrics.slo_missed).labels(slo.name).inc()


class Session:
    """The queue slots of one API call. Leaving it ends whatever is unfinished, everywhere."""

    def __init__(self, gateway: Gateway, base_id: str, ids: Sequence[str], choices: int) -> None:
        self.ids = list(ids)
        self._base_id = base_id
        self.requests: list[GatewayRequest] = []
        self._gateway = gateway
        self._choices = choices
        self._arrival_s = time.monotonic()
        self._reserved: list[str] = []

    async def __aenter__(self) -> Session:
        gateway = self._gateway
        if gateway.draining:
            raise PacelineError(
                ErrorKind.UNAVAILABLE, "the server is draining", retry_after_s=DRAIN_RETRY_AFTER_S
            )
        if not gateway.fleet.ready:
            raise PacelineError(
                ErrorKind.UNAVAILABLE, "no verifier is connected", retry_after_s=RETRY_AFTER_S
            )
        in_use = {job_id for ids in gateway.open_calls.values() for job_id in ids}
        if self._base_id in gateway.open_calls or in_use.intersection(self.ids):
            raise PacelineError(
                ErrorKind.ALREADY_EXISTS, f"request id {self._base_id!r} is in use", field="x-request-id"
            )
        gateway.open_calls[self._base_id] = self.ids
        try:
            for job_id in self.ids:
                self._reserved.append(job_id)
                await gateway.queue.reserve(job_id, self._choices)
        except BaseException:
            self._release()
            raise
        return self

    async def submit(self, job: Job) -> GatewayRequest:
        """Enqueues one of this call's requests."""
        request = GatewayRequest(job, self._gateway.codec, self._arrival_s)
        await self._gateway.dispatcher.submit(request)
        self._reserved.remove(job.request_id)
        self.requests.append(request)
        return request

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def usage(self) -> Usage:
        return Usage(
            sum(len(r.job.prompt_token_ids) for r in self.requests),
            sum(r.completion_tokens for r in self.requests),
            sum(r.cached_tokens for r in self.requests),
        )

    def _release(self) -> None:
        # Without awaiting: this runs also while the call is being cancelled.
        dispatcher = self._gateway.dispatcher
        for request in self.requests:
            dispatcher.cancel(request)
        for job_id in self._reserved:
            dispatcher.background(self._gateway.queue.cancel(job_id))
        self._gateway.open_calls.pop(self._base_id, None)
