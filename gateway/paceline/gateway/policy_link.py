"""The gateway's end of the policy: the routing table, kept when the policy is gone, and its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from paceline.core.types import LatencyMs
from paceline.v1 import policy_pb2, policy_pb2_grpc
from paceline.wire.channels import open_channel
from paceline.wire.tasks import end_if_cancelled
from paceline.wire.telemetry import get_logger

ANSWER_TIMEOUT_S = 0.5
_RETRY_S = 1.0
_log = get_logger(__name__)
ResponseT = TypeVar("ResponseT")


class PolicyLink:
    """Watches one policy. Nothing here raises for a policy that is dead or slow; answers are None then."""

    def __init__(self, address: str, *, on_table: Callable[[], None] = lambda: None) -> None:
        self._channel = open_channel(address)
        self._stub: Any = policy_pb2_grpc.PolicyStub(self._channel)
        self._on_table = on_table
        self._table: policy_pb2.WatchResponse | None = None
        self._table_s = 0.0
        self.connected = False

    @property
    def pairs(self) -> list[policy_pb2.Pair]:
        return [] if self._table is None else list(self._table.pairs)

    @property
    def workers(self) -> list[policy_pb2.WorkerStatus]:
        """As last reported, ages carried on to now."""
        if self._table is None:
            return []
        workers = []
        for status in self._table.workers:
            aged = policy_pb2.WorkerStatus()
            aged.CopyFrom(status)
            aged.last_report_age_s += self.table_age_s
            workers.append(aged)
        return workers

    @property
    def table_age_s(self) -> float:
        return time.monotonic() - self._table_s

    @property
    def plan_age_s(self) -> float | None:
        return None if self._table is None else self._table.plan_age_s + self.table_age_s

    def weight(self, verifier_id: str) -> float:
        """Routing weight of a verifier; 1 where the policy says nothing."""
        weights = [pair.weight for pair in self.pairs if pair.verifier_id == verifier_id]
        return sum(weights) if weights else 1.0

    async def watch(self) -> None:
        """Follows the table until cancelled; reconnects."""
        while True:
            call = self._stub.Watch(policy_pb2.WatchRequest())
            try:
                async for table in call:
                    self._take(table)
                reason = "stream ended"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            finally:
                call.cancel()
            end_if_cancelled()
            if self.connected:
                _log.warning("policy_lost", reason=reason)
            self.connected = False
            await asyncio.sleep(_RETRY_S)

    async def predict(self, prompt_tokens: int, output_tokens: int, verifier_id: str) -> LatencyMs | None:
        if not self.connected:
            return None
        request = policy_pb2.PredictRequest(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, verifier_id=verifier_id
        )
        answer = await self._ask(self._stub.Predict(request, timeout=ANSWER_TIMEOUT_S))
        if answer is None or not answer.known:
            return None
        return LatencyMs(ttft_ms=answer.ttft_ms, tpot_ms=answer.tpot_ms, e2e_ms=answer.e2e_ms)

    async def explain(self, request: policy_pb2.ExplainRequest) -> policy_pb2.ExplainResponse | None:
        return await self._ask(self._stub.Explain(request, timeout=ANSWER_TIMEOUT_S))

    async def refresh(self) -> None:
        """Takes the fleet as the policy sees it now, if it answers."""
        if not self.connected:
            return
        fleet = await self._ask(self._stub.Fleet(policy_pb2.FleetRequest(), timeout=ANSWER_TIMEOUT_S))
        if fleet is not None:
            self._take(
                policy_pb2.WatchResponse(
                    pairs=fleet.pairs, workers=fleet.workers, plan_age_s=fleet.plan_age_s
                )
            )

    async def close(self) -> None:
        await self._channel.close()

    def _take(self, table: policy_pb2.WatchResponse) -> None:
        if not self.connected:
            _log.info("policy_connected")
        self.connected = True
        self._table, self._table_s = table, time.monotonic()
        self._on_table()

    async def _ask(self, call: Awaitable[ResponseT]) -> ResponseT | None:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            _log.debug("policy_did_not_answer", reason=error.details())
            return None
        finally:
            call.cancel()  # type: ignore[attr-defined]
