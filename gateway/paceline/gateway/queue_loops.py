"""The standing work towards the queue: granting, heartbeat, leases, restoring, reaping."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from paceline.core.errors import ErrorKind, PacelineError
from paceline.gateway.fleet import Fleet, kv_tokens, sequences
from paceline.gateway.policy_link import PolicyLink
from paceline.gateway.queue import AdmissionQueue, Grant, Lease, Ticket, WorkerCredit
from paceline.gateway.request import GatewayRequest
from paceline.wire.tasks import end_if_cancelled
from paceline.wire.telemetry import get_logger

POLL_S = 0.1
"""How often grants are tried while requests wait: other gateways free credit too."""
HEARTBEAT_S = 1.5
POP_S = 1.0
RECOVERY_S = 0.5
OVERDUE_S = 2.0
"""A request that the queue has not answered for this long after its deadline is ended here."""
_log = get_logger(__name__)


class Owner(Protocol):
    """Who holds the requests."""

    @property
    def live(self) -> Mapping[str, GatewayRequest]: ...

    @property
    def running_ids(self) -> set[str]: ...

    def granted(self, request: GatewayRequest, grant: Grant) -> None: ...

    def expired(self, request: GatewayRequest) -> None: ...


class QueueLoops:
    """Runs until cancelled. A queue that fails is tried again; what runs on verifiers goes on."""

    def __init__(
        self, queue: AdmissionQueue, fleet: Fleet, policy: PolicyLink, owner: Owner, *, lease_s: float
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._policy = policy
        self._owner = owner
        self._lease_s = lease_s

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, loop in (
                ("grant", self._grant),
                ("receive", self._receive),
                ("lease", self._hold_leases),
                ("reap", self._reap),
                ("overdue", self._end_overdue),
            ):
                tasks.create_task(self._supervise(name, loop))

    def ticket(self, request: GatewayRequest) -> Ticket:
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

    async def _supervise(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await loop()
            except Exception as error:  # noqa: BLE001 - a loop's boundary: the queue may be gone for a while
                end_if_cancelled()
                _log.error("queue_loop_failed", loop=name, reason=str(error), kind=type(error).__name__)
                await asyncio.sleep(RECOVERY_S)

    async def _grant(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._waiting() else HEARTBEAT_S):
                    await self._fleet.changed.wait()
            self._fleet.changed.clear()
            if self._waiting() and (workers := self._credits()):
                await self._queue.grant(workers)

    def _waiting(self) -> bool:
        return any(request.queued for request in self._owner.live.values())

    def _credits(self) -> list[WorkerCredit]:
        workers = [
            WorkerCredit(
                verifier_id=link.id,
                sequences=sequences(link),
                kv_tokens=kv_tokens(link),
                weight=self._policy.weight(link.id),
            )
            for link in self._fleet.grantable
        ]
        # A table that gives every verifier nothing must not stop the service.
        return [worker for worker in workers if worker.weight > 0] or workers

    async def _receive(self) -> None:
        while True:
            for grant in await self._queue.next_grants(POP_S):
                request = self._owner.live.get(grant.request_id)
                if request is None:
                    await self._queue.cancel(grant.request_id)
                elif grant.request_id in self._owner.running_ids:
                    continue
                elif grant.verifier_id:
                    self._owner.granted(request, grant)
                else:
                    self._owner.expired(request)

    async def _hold_leases(self) -> None:
        while True:
            await self._queue.heartbeat()
            running = self._owner.running_ids
            leases = [self._lease(r) for i, r in self._owner.live.items() if i in running]
            if leases:
                await self._queue.extend(leases)
            await self._restore()
            await asyncio.sleep(min(self._lease_s / 3, HEARTBEAT_S))

    def _lease(self, request: GatewayRequest) -> Lease:
        ticket = self.ticket(request)
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
        """Puts waiting requests back that the server lost.

        One on its way to the server looks the same for a moment: only those missed twice are put back.
        """
        lost = await self._missed()
        if not lost:
            return
        await asyncio.sleep(RECOVERY_S)
        for request in await self._missed():
            if request in lost and request.queued and not request.closed:
                _log.warning("request_put_back", request=request.job.request_id)
                try:
                    await self._queue.enqueue(self.ticket(request))
                except PacelineError as error:
                    if error.kind is not ErrorKind.ALREADY_EXISTS:
                        raise
        self._fleet.changed.set()

    async def _missed(self) -> list[GatewayRequest]:
        waiting = {i: request for i, request in self._owner.live.items() if request.queued}
        lost = await self._queue.missing(list(waiting)) if waiting else []
        return [waiting[i] for i in lost]

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._queue.reap()

    async def _end_overdue(self) -> None:
        """Needs no queue: its requests must get their answer also while it is gone."""
        while True:
            await asyncio.sleep(RECOVERY_S)
            now = time.monotonic()
            for request in tuple(self._owner.live.values()):
                if request.queued and now > request.queued_s + request.job.timeout_s + OVERDUE_S:
                    self._owner.expired(request)
