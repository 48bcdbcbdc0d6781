"""The Policy service: reports in, plans and the routing table out. All state lives in `fleet`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import suppress
from typing import Any

from paceline.policy.fleet import Fleet, PairStatus, WorkerStatus
from paceline.policy.reports import parse
from paceline.v1 import policy_pb2, policy_pb2_grpc
from paceline.wire.convert import draft_plan_to_proto, worker_role_to_proto, worker_state_to_proto
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)


class _Signal:
    """Wakes all waiters; a waiter that names the last version it saw misses nothing."""

    def __init__(self) -> None:
        self.version = 0
        self._event = asyncio.Event()

    def fire(self) -> None:
        self.version += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> None:
        if self.version == seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()


class _Pacer:
    """Paces one stream: due when its key changed, and at least each ``push_s``."""

    def __init__(self, signal: _Signal, push_s: float) -> None:
        self._signal = signal
        self._push_s = push_s
        self._sent: Hashable = None
        self._next_s = 0.0

    async def due(self, key: Callable[[], Hashable]) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            version, current, now_s = self._signal.version, key(), clock()
            if current != self._sent or now_s >= self._next_s:
                self._sent, self._next_s = current, now_s + self._push_s
                return
            await self._signal.wait(version, self._next_s - now_s)


class _Link:
    """One Sync stream and the worker that reports by it."""

    def __init__(self) -> None:
        self.worker_id = ""


class PolicyServicer(policy_pb2_grpc.PolicyServicer):
    """Serves `Fleet`; `run` must run beside it.

    Args:
        tick_s: interval of replanning; also the grain of probing.
        push_s: longest interval between two messages of a stream.
    """

    def __init__(self, fleet: Fleet, *, tick_s: float = 0.1, push_s: float = 1.0) -> None:
        self._fleet = fleet
        self._tick_s = tick_s
        self._push_s = push_s
        self._signal = _Signal()
        self._stopped = False

    async def run(self) -> None:
        """Replans each ``tick_s`` until cancelled. A failed plan leaves the last one standing."""
        while True:
            try:
                self.refresh()
            except Exception:  # noqa: BLE001 - supervised loop: logged, and the plan's age shows it
                _log.exception("replan_failed")
            await asyncio.sleep(self._tick_s)

    def refresh(self) -> None:
        """Replans now and wakes the streams."""
        self._fleet.replan()
        self._signal.fire()

    def stop(self) -> None:
        """Ends all streams."""
        self._stopped = True
        self._signal.fire()

    async def Sync(self, request_iterator: Any, context: Any) -> AsyncIterator[policy_pb2.SyncResponse]:
        link = _Link()
        reader = asyncio.create_task(self._read(request_iterator, link))
        reader.add_done_callback(lambda _: self._signal.fire())
        pacer = _Pacer(self._signal, self._push_s)

        def key() -> Hashable:
            plans = self._fleet.plans_for(link.worker_id)
            decided = tuple((plan.drafter_id, plan.draft_tokens, plan.reason) for plan in plans)
            return reader.done() or self._stopped, decided

        try:
            while True:
                await pacer.due(key)
                if reader.done() or self._stopped:
                    break
                plans = self._fleet.plans_for(link.worker_id)
                if plans:
                    yield policy_pb2.SyncResponse(plans=[draft_plan_to_proto(plan) for plan in plans])
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._fleet.stream_ended(link)
            self.refresh()

    async def _read(self, requests: AsyncIterator[policy_pb2.SyncRequest], link: _Link) -> None:
        async for message in requests:
            report = parse(message, self._fleet.ignored)
            if report is None:
                continue
            if link.worker_id not in ("", report.worker_id):
                self._fleet.ignored["foreign_worker"] += 1
                continue
            if self._fleet.observe(report, link) and not link.worker_id:
                link.worker_id = report.worker_id
                self.refresh()

    async def Watch(
        self, request: policy_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.WatchResponse]:
        pacer = _Pacer(self._signal, self._push_s)

        def key() -> Hashable:
            workers = tuple((w.id, w.state, w.pid) for w in self._fleet.statuses())
            pairs = tuple(
                (p.verifier_id, p.drafter_id, p.draft_tokens, round(p.weight, 2)) for p in self._fleet.pairs
            )
            return self._stopped, workers, pairs

        while True:
            await pacer.due(key)
            if self._stopped:
                return
            workers, pairs = self._table()
            yield policy_pb2.WatchResponse(pairs=pairs, workers=workers, plan_age_s=self._fleet.plan_age_s)

    async def Predict(self, request: policy_pb2.PredictRequest, context: Any) -> policy_pb2.PredictResponse:
        found = self._fleet.predict(request.prompt_tokens, request.output_tokens, request.verifier_id)
        if found is None:
            return policy_pb2.PredictResponse(known=False)
        return policy_pb2.PredictResponse(
            known=True,
            ttft_ms=found.ttft_s * 1e3,
            tpot_ms=found.tpot_s * 1e3,
            e2e_ms=found.e2e_s(request.output_tokens) * 1e3,
        )

    async def Explain(self, request: policy_pb2.ExplainRequest, context: Any) -> policy_pb2.ExplainResponse:
        found = self._fleet.explain(
            request.verifier_id, request.drafter_id, request.prompt_tokens, request.output_tokens
        )
        return policy_pb2.ExplainResponse(
            plan=draft_plan_to_proto(found.plan),
            neighbours=[
                policy_pb2.Neighbour(draft_tokens=k, tpot_ms=tpot_s * 1e3)
                for k, tpot_s in enumerate(found.tpot_s)
            ],
            break_even_rps=found.break_even_rps,
        )

    async def Fleet(self, request: policy_pb2.FleetRequest, context: Any) -> policy_pb2.FleetResponse:
        workers, pairs = self._table()
        return policy_pb2.FleetResponse(workers=workers, pairs=pairs, plan_age_s=self._fleet.plan_age_s)

    def _table(self) -> tuple[list[policy_pb2.WorkerStatus], list[policy_pb2.Pair]]:
        workers = [_worker_to_proto(worker) for worker in self._fleet.statuses()]
        return workers, [_pair_to_proto(pair) for pair in self._fleet.pairs]


def _worker_to_proto(worker: WorkerStatus) -> policy_pb2.WorkerStatus:
    return policy_pb2.WorkerStatus(
        id=worker.id,
        role=worker_role_to_proto(worker.role),
        state=worker_state_to_proto(worker.state),
        pid=worker.pid,
        running=worker.running,
        sessions=worker.sessions,
        blocks_used=worker.blocks_used,
        slowdown_observed=worker.slowdown_observed,
        alpha=worker.alpha,
        last_report_age_s=worker.last_report_age_s,
    )


def _pair_to_proto(pair: PairStatus) -> policy_pb2.Pair:
    return policy_pb2.Pair(
        verifier_id=pair.verifier_id,
        drafter_id=pair.drafter_id,
        weight=pair.weight,
        draft_tokens=pair.draft_tokens,
        predicted_tpot_ms=pair.predicted_tpot_s * 1e3,
    )
