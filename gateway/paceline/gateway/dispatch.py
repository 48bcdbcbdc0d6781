"""From grants to verifier calls, and back to the queue after a loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from paceline.core.errors import ErrorKind, PacelineError
from paceline.gateway.fleet import Fleet, WorkerLink
from paceline.gateway.policy_link import PolicyLink
from paceline.gateway.queue import AdmissionQueue, Grant
from paceline.gateway.queue_loops import QueueLoops
from paceline.gateway.request import Choice, Delta, GatewayRequest
from paceline.gateway.verifier_call import LostError, RefusedError, generate
from paceline.wire.telemetry import get_logger

MAX_LOSSES = 2
"""Verifiers that may be lost under one request before it fails."""
MAX_REFUSALS = 16
RETRY_AFTER_S = 1.0
_log = get_logger(__name__)


class _Outcome(Enum):
    DONE = "done"
    LOST = "lost"
    REFUSED = "refused"


class Dispatcher:
    """Owns every admitted request of this gateway.

    Args:
        on_tokens: called with the request, the choice, the count of new tokens, and when the last ones came.
        on_finished: called once for each request when it ended, well or not.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        fleet: Fleet,
        policy: PolicyLink,
        *,
        lease_s: float,
        on_tokens: Callable[[GatewayRequest, Choice, int, float | None], None],
        on_finished: Callable[[GatewayRequest], None],
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._policy = policy
        self._on_tokens = on_tokens
        self._on_finished = on_finished
        self._loops = QueueLoops(queue, fleet, policy, self, lease_s=lease_s)
        self._live: dict[str, GatewayRequest] = {}
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live(self) -> dict[str, GatewayRequest]:
        return self._live

    @property
    def running_ids(self) -> set[str]:
        return set(self._running)

    async def run(self) -> None:
        """Serves the queue until cancelled."""
        try:
            await self._loops.run()
        finally:
            tasks = (*self._running.values(), *self._background)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, request: GatewayRequest) -> None:
        """Enqueues a request whose slot is reserved; raises PacelineError if the queue cannot take it."""
        self._live[request.job.request_id] = request
        self._idle.clear()
        try:
            await self._queue.enqueue(self._loops.ticket(request))
        except BaseException:
            self._forget(request)
            raise
        # Its grant may have come already.
        request.queued = request.epoch == 0
        self._fleet.changed.set()

    def cancel(self, request: GatewayRequest) -> None:
        """Ends a request whose client left; nothing happens if it ended already."""
        if request.closed:
            return
        request.fail(PacelineError(ErrorKind.CANCELLED, "the request was cancelled"))
        task = self._running.get(request.job.request_id)
        if task is not None:
            task.cancel()
        else:
            self._close(request)
            self.background(self._queue.cancel(request.job.request_id))

    def granted(self, request: GatewayRequest, grant: Grant) -> None:
        """Starts a request on the verifier it was granted."""
        request.epoch, request.verifier_id, request.queued = grant.epoch, grant.verifier_id, False
        # A queue that was emptied counts from the start again; verifiers refuse what is older.
        request.call_epoch = max(grant.epoch, request.call_epoch + 1)
        task = asyncio.create_task(self._serve(request))
        self._running[grant.request_id] = task
        # Not in a `finally` of the task: one that is cancelled before its first step never runs any.
        task.add_done_callback(lambda done: self._served(request, done))

    def expired(self, request: GatewayRequest) -> None:
        """Ends a request that waited as long as it may."""
        job = request.job
        if job.caller_timeout_s is not None and job.caller_timeout_s <= job.timeout_s:
            error = PacelineError(ErrorKind.DEADLINE_EXCEEDED, "the caller's deadline passed in the queue")
        else:
            error = PacelineError(
                ErrorKind.UNAVAILABLE,
                f"waited {job.timeout_s:g} s without a free verifier",
                retry_after_s=RETRY_AFTER_S,
            )
        request.fail(error)
        self.cancel(request)

    async def drained(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    def abort_all(self, error: PacelineError) -> None:
        """Ends every request with ``error`` as its terminal event."""
        for request in tuple(self._live.values()):
            request.fail(error)
            self.cancel(request)

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work nobody waits for; failures are logged."""
        task = asyncio.create_task(work)
        self._background.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._background.discard(finished)
            if not finished.cancelled() and finished.exception() is not None:
                _log.warning("background_work_failed", reason=str(finished.exception()))

        task.add_done_callback(done)

    async def _serve(self, request: GatewayRequest) -> bool:
        """Runs a granted request on its verifier; True if it must go back to the queue."""
        if request.losses == request.refusals == 0:
            request.dispatch_s = time.monotonic()
            if request.job.speculation.receipt:
                self.background(self._predict(request))
        try:
            outcomes = await self._generate(request, self._fleet.links.get(request.verifier_id))
            request.losses += _Outcome.LOST in outcomes
            request.refusals += _Outcome.REFUSED in outcomes
            if request.finished:
                return False
            if request.losses <= MAX_LOSSES and request.refusals <= MAX_REFUSALS:
                return True
            reason = (
                f"{request.losses} verifiers were lost under this request"
                if request.losses > MAX_LOSSES
                else f"verifiers refused this request {request.refusals} times"
            )
            request.fail(PacelineError(ErrorKind.UNAVAILABLE, reason, retry_after_s=RETRY_AFTER_S))
        except PacelineError as error:
            request.fail(error)
        except Exception as error:  # noqa: BLE001 - the request's boundary: it must get its terminal event
            _log.exception("request_failed", request=request.job.request_id)
            request.fail(PacelineError(ErrorKind.INTERNAL, f"internal error: {type(error).__name__}"))
        return False

    def _served(self, request: GatewayRequest, task: asyncio.Task[bool]) -> None:
        self._running.pop(request.job.request_id, None)
        if not task.cancelled() and task.result():
            self.background(self._requeue(request))
        else:
            request.fail(PacelineError(ErrorKind.CANCELLED, "the request was cancelled"))
            self._close(request)
            self.background(self._queue.ack(request.job.request_id, served_tokens=request.served_tokens))
        self._fleet.changed.set()

    async def _requeue(self, request: GatewayRequest) -> None:
        request_id, avoid = request.job.request_id, request.verifier_id
        _log.warning("request_resumes", request=request_id, lost=avoid, losses=request.losses)
        # Where nobody else can take it, the same verifier may have come back.
        alternatives = any(link.id != avoid for link in self._fleet.grantable)
        if request.refusals:
            # Busy verifiers need a moment; without a pause the refusals are used up at once.
            await asyncio.sleep(min(1.0, 0.02 * 2**request.refusals))
        if request.closed:
            return
        request.queued_s = time.monotonic()
        request.queued = True  # until `granted`, which may come before the call below returns
        try:
            if not await self._queue.nack(request_id, avoid=avoid if alternatives else ""):
                await self._queue.enqueue(self._loops.ticket(request))
        except PacelineError as error:
            request.fail(
                PacelineError(
                    ErrorKind.UNAVAILABLE,
                    f"the verifier was lost and the queue does not take the request back: {error.message}",
                    retry_after_s=RETRY_AFTER_S,
                )
            )
            self._close(request)
            return
        if request.closed:
            await self._queue.cancel(request_id)
        self._fleet.changed.set()

    async def _generate(self, request: GatewayRequest, link: WorkerLink | None) -> set[_Outcome]:
        if link is None or link.described is None:
            return {_Outcome.REFUSED}
        tasks = [
            asyncio.create_task(self._choice(request, choice, link))
            for choice in request.choices
            if choice.finish is None
        ]
        try:
            return set(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, request: GatewayRequest, choice: Choice, link: WorkerLink) -> _Outcome:
        before_s = choice.last_token_s

        def deliver(delta: Delta) -> None:
            nonlocal before_s
            if delta.token_ids:
                self._on_tokens(request, choice, len(delta.token_ids), before_s)
                before_s = choice.last_token_s
            request.put(delta)

        try:
            reason = await generate(link, request, choice, deliver)
        except RefusedError as error:
            _log.info("verifier_refused", request=request.job.request_id, verifier=link.id, reason=str(error))
            link.suspect()
            return _Outcome.REFUSED
        except LostError as error:
            _log.warning("verifier_lost", request=request.job.request_id, verifier=link.id, reason=str(error))
            link.suspect()
            end = choice.reached_end
            if end is None:
                return _Outcome.LOST
            reason = end
        delta = choice.end(reason)
        choice.observe(request.job, request.arrival_s, request.dispatch_s, request.predicted)
        request.put(delta)
        return _Outcome.DONE

    async def _predict(self, request: GatewayRequest) -> None:
        job = request.job
        predicted = await self._policy.predict(
            len(job.prompt_token_ids), job.sampling.max_tokens or 1, request.verifier_id
        )
        if predicted is not None:
            request.predicted = predicted

    def _close(self, request: GatewayRequest) -> None:
        if request.closed:
            return
        request.closed = True
        self._forget(request)
        self._on_finished(request)

    def _forget(self, request: GatewayRequest) -> None:
        self._live.pop(request.job.request_id, None)
        if not self._live:
            self._idle.set()
