"""From the queue's grants to verifier calls, and back to the queue after a loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from paceline.core.errors import ErrorKind, PacelineError
from paceline.gateway.fleet import Fleet, WorkerLink, kv_tokens, sequences
from paceline.gateway.policy_link import PolicyLink
from paceline.gateway.queue import AdmissionQueue, Grant, Lease, Ticket, WorkerCredit
from paceline.gateway.request import Choice, Delta, GatewayRequest
from paceline.gateway.verifier_call import LostError, RefusedError, generate
from paceline.wire.telemetry import get_logger

MAX_LOSSES = 2
"""Verifiers that may be lost under one request before it fails."""
MAX_REFUSALS = 16
RETRY_AFTER_S = 1.0
_POLL_S = 0.1
"""How often grants are tried while requests wait: other gateways free credit too."""
_RECOVERY_S = 0.5
_POP_S = 1.0
HEARTBEAT_S = 1.5
_log = get_logger(__name__)


class _Outcome(Enum):
    DONE = "done"
    LOST = "lost"
    REFUSED = "refused"


class Dispatcher:
    """Owns every admitted request of this gateway.

    Args:
        on_tokens: called with the request, the choice, the number of new tokens, and when the ones before came.
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
        self._lease_s = lease_s
        self._on_tokens = on_tokens
        self._on_finished = on_finished
        self._wake = fleet.changed
        self._live: dict[str, GatewayRequest] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live(self) -> dict[str, GatewayRequest]:
        return self._live

    @property
    def running(self) -> int:
        return len(self._running)

    async def submit(self, request: GatewayRequest) -> None:
        """Enqueues a request whose slot is reserved; raises PacelineError if the queue cannot take it."""
        self._live[request.job.request_id] = request
        self._idle.clear()
        try:
            await self._queue.enqueue(self._ticket(request))
            request.queued = True
        except BaseException:
            self._forget(request)
            raise
        self._wake.set()

    def _ticket(self, request: GatewayRequest) -> Ticket:
        job = request.job
        return Ticket(
            request_id=job.request_id,
            slo_class=job.slo.name,
            priority=job.priority,
            tenant=job.tenant,
            # More than any verifier has would never be granted; it takes such a request in turns.
            sequences=min(job.sampling.n, self._fleet.max_sequences),
            kv_tokens=min(job.kv_tokens, self._fleet.max_kv_tokens),
            deadline_s=max(0.1, request.queued_s + job.timeout_s - time.monotonic()),
        )

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

    async def run(self) -> None:
        """Serves the queue until cancelled. A queue that fails is tried again; running work goes on."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._supervise("grant", self._grant))
                tasks.create_task(self._supervise("receive", self._receive))
                tasks.create_task(self._supervise("lease", self._hold_leases))
                tasks.create_task(self._supervise("reap", self._reap))
        finally:
            for task in (*self._running.values(), *self._background):
                task.cancel()
            await asyncio.gather(*self._running.values(), *self._background, return_exceptions=True)

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

    async def _supervise(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await loop()
            except Exception as error:  # noqa: BLE001 - a loop's boundary: the queue may be gone for a while
                _log.error("queue_loop_failed", loop=name, reason=str(error), kind=type(error).__name__)
                await asyncio.sleep(_RECOVERY_S)

    async def _grant(self) -> None:
        while True:
            waiting = len(self._live) > len(self._running)
            try:
                await asyncio.wait_for(self._wake.wait(), _POLL_S if waiting else self._lease_s / 3)
            except TimeoutError:
                pass
            self._wake.clear()
            if credits := self._credits():
                await self._queue.grant(credits)
            self._expire_here()

    def _credits(self) -> list[WorkerCredit]:
        credits = [
            WorkerCredit(
                verifier_id=link.id,
                sequences=sequences(link),
                kv_tokens=kv_tokens(link),
                weight=self._policy.weight(link.id),
            )
            for link in self._fleet.ready
        ]
        # A table that gives every verifier nothing must not stop the service.
        return [credit for credit in credits if credit.weight > 0] or credits

    def _expire_here(self) -> None:
        """Fails requests the queue has lost or never answered for, well after their deadline."""
        now = time.monotonic()
        for request in tuple(self._live.values()):
            waited_s = now - request.queued_s
            if request.job.request_id not in self._running and waited_s > request.job.timeout_s + 2.0:
                self._expired(request)

    def _expired(self, request: GatewayRequest) -> None:
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

    async def _receive(self) -> None:
        while True:
            for grant in await self._queue.next_grants(_POP_S):
                request = self._live.get(grant.request_id)
                if request is None:
                    await self._queue.cancel(grant.request_id)
                elif not grant.verifier_id:
                    self._expired(request)
                elif grant.request_id not in self._running:
                    task = asyncio.create_task(self._serve(request, grant))
                    self._running[grant.request_id] = task

    async def _hold_leases(self) -> None:
        while True:
            await self._queue.heartbeat()
            running = [r for r in self._live.values() if r.job.request_id in self._running]
            if running:
                await self._queue.extend([self._lease(request) for request in running])
            await self._restore()
            await asyncio.sleep(min(self._lease_s / 3, HEARTBEAT_S))

    def _lease(self, request: GatewayRequest) -> Lease:
        ticket = self._ticket(request)
        return Lease(
            request_id=ticket.request_id,
            verifier_id=request.verifier_id,
            epoch=request.epoch,
            slo_class=ticket.slo_class,
            tenant=ticket.tenant,
            sequences=ticket.sequences,
            kv_tokens=ticket.kv_tokens,
        )

    async def _restore(self) -> None:
        """Puts waiting requests back that the server lost; it knows fewer than this gateway then."""
        waiting = [r for i, r in self._live.items() if i not in self._running and r.queued]
        if waiting and (await self._queue.depth()).waiting_requests < len(waiting):
            for request in waiting:
                # Again: some may have been granted or have ended meanwhile.
                if not request.closed and request.job.request_id not in self._running and request.queued:
                    await self._queue.enqueue(self._ticket(request))
            self._wake.set()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s)
            await self._queue.reap()

    async def _serve(self, request: GatewayRequest, grant: Grant) -> None:
        """Runs a granted request on its verifier; a loss gives it back to the queue."""
        request_id = request.job.request_id
        request.epoch, request.verifier_id, request.queued = grant.epoch, grant.verifier_id, False
        if request.losses == request.refusals == 0:
            request.dispatch_s = time.monotonic()
            self.background(self._predict(request))
        again = False
        try:
            outcomes = await self._generate(request, self._fleet.links.get(grant.verifier_id))
            request.losses += _Outcome.LOST in outcomes
            request.refusals += _Outcome.REFUSED in outcomes
            again = not request.finished
            if again and (request.losses > MAX_LOSSES or request.refusals > MAX_REFUSALS):
                again = False
                raise PacelineError(
                    ErrorKind.UNAVAILABLE,
                    f"{request.losses} verifiers were lost under this request",
                    retry_after_s=RETRY_AFTER_S,
                )
        except PacelineError as error:
            request.fail(error)
        except Exception as error:  # noqa: BLE001 - the request's boundary: it must get its terminal event
            _log.exception("request_failed", request=request_id)
            request.fail(PacelineError(ErrorKind.INTERNAL, f"internal error: {type(error).__name__}"))
        finally:
            self._running.pop(request_id, None)
            if again:
                self.background(self._requeue(request))
            else:
                if not request.finished:
                    request.fail(PacelineError(ErrorKind.CANCELLED, "the request was cancelled"))
                self._close(request)
                self.background(self._queue.ack(request_id, served_tokens=request.served_tokens))
            self._wake.set()

    async def _requeue(self, request: GatewayRequest) -> None:
        avoid = request.verifier_id
        _log.warning("request_resumes", request=request.job.request_id, lost=avoid, losses=request.losses)
        # Where nobody else can take it, the same verifier may have come back.
        alternatives = any(link.id != avoid for link in self._fleet.ready)
        request.queued_s = time.monotonic()
        try:
            if not await self._queue.nack(request.job.request_id, avoid=avoid if alternatives else ""):
                await self._queue.enqueue(self._ticket(request))
            request.queued = True
        except Exception as error:  # noqa: BLE001 - the queue is gone: the client is told, not kept waiting
            request.fail(
                PacelineError(
                    ErrorKind.UNAVAILABLE,
                    f"the verifier was lost and the queue does not answer: {error}",
                    retry_after_s=RETRY_AFTER_S,
                )
            )
            self._close(request)
        self._wake.set()

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
        def deliver(delta: Delta) -> None:
            nonlocal before_s
            if delta.token_ids:
                self._on_tokens(request, choice, len(delta.token_ids), before_s)
                before_s = choice.last_token_s
            request.put(delta)

        before_s = choice.last_token_s
        try:
            reason = await generate(link, request, choice, deliver)
        except RefusedError as error:
            _log.info("verifier_refused", request=request.job.request_id, verifier=link.id, reason=str(error))
            return _Outcome.REFUSED
        except LostError as error:
            _log.warning("verifier_lost", request=request.job.request_id, verifier=link.id, reason=str(error))
            return _Outcome.LOST
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
