"""A cancellation that grpc.aio or redis-py loses still ends every standing loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paceline.core.types import WorkerRole
from paceline.drafter.policy_link import PolicyLink as DrafterPolicyLink
from paceline.gateway.fleet import WorkerLink
from paceline.gateway.policy_link import PolicyLink as GatewayPolicyLink
from paceline.gateway.queue_loops import QueueLoops
from paceline.v1 import drafter_pb2_grpc, policy_pb2, policy_pb2_grpc, verifier_pb2_grpc, worker_pb2_grpc
from paceline.verifier.link import DrafterLink, LinkSettings, TargetIdentity
from paceline.verifier.policy_link import PolicyLink as VerifierPolicyLink
from paceline.verifier.reports import Reports

NOWHERE = "127.0.0.1:1"
Loop = Callable[[], Coroutine[Any, Any, None]]


class Lossy:
    """A call that waits, and answers a cancellation with its error, as grpc.aio does at a call's end."""

    def __init__(self, error: Exception) -> None:
        self.waiting = asyncio.Event()
        self.lost = 0
        self.honest = False
        self._error = error

    async def wait(self, *_: Any, **__: Any) -> Any:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.lost += 1
            if self.honest:
                raise
            raise self._error from None

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield await self.wait()

    def __await__(self) -> Any:
        return self.wait().__await__()

    async def wait_for_connection(self) -> None:
        await asyncio.Event().wait()

    def cancel(self) -> bool:
        return False


def gone() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="connection refused")


def verifier_policy() -> Loop:
    return VerifierPolicyLink(NOWHERE, snapshot=policy_pb2.SyncRequest, reports=Reports(), longest=8).run


def verifier_drafter() -> Loop:
    return DrafterLink(
        "d0",
        "null",
        NOWHERE,
        target=TargetIdentity("", 5),
        settings=LinkSettings(),
        reports=Reports(),
        news=lambda _: None,
        stale=lambda _: None,
        clock=lambda: 0.0,
    ).run


def drafter_policy() -> Loop:
    return DrafterPolicyLink(NOWHERE, policy_pb2.SyncRequest).run


def gateway_policy() -> Loop:
    return GatewayPolicyLink(NOWHERE).watch


def gateway_worker() -> Loop:
    return WorkerLink("d0", WorkerRole.DRAFTER, NOWHERE, None, lambda: None).keep


@pytest.mark.parametrize(
    "make", [verifier_policy, verifier_drafter, drafter_policy, gateway_policy, gateway_worker]
)
async def test_links_end(make: Callable[[], Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Lossy(gone())
    methods = dict.fromkeys(("Sync", "Watch", "Describe"), lambda *_, **__: call)
    for module, name in (
        (policy_pb2_grpc, "PolicyStub"),
        (worker_pb2_grpc, "WorkerStub"),
        (verifier_pb2_grpc, "VerifierStub"),
        (drafter_pb2_grpc, "DrafterStub"),
    ):
        monkeypatch.setattr(module, name, lambda _: SimpleNamespace(**methods))
    await ends_when_cancelled(make(), call)


async def test_queue_loops_end() -> None:
    call = Lossy(ConnectionError("connection refused"))
    queue: Any = SimpleNamespace(
        grant=call.wait, next_grants=call.wait, heartbeat=call.wait, reap=call.wait, missing=call.wait
    )
    fleet: Any = SimpleNamespace(changed=asyncio.Event(), grantable=[])
    owner: Any = SimpleNamespace(live={}, running_ids=set())
    policy: Any = SimpleNamespace()
    await ends_when_cancelled(QueueLoops(queue, fleet, policy, owner, lease_s=5).run, call)


async def ends_when_cancelled(loop: Loop, call: Lossy) -> None:
    task = asyncio.create_task(loop())
    try:
        async with asyncio.timeout(5):
            await call.waiting.wait()
            task.cancel()
            await asyncio.wait({task})
    finally:
        call.honest = True
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
    assert call.lost
