"""The link to the policy: reports up, plans down. Without it the last plans stay."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from paceline.core.control import plan_fault
from paceline.core.types import DraftPlan
from paceline.v1 import policy_pb2, policy_pb2_grpc
from paceline.verifier.reports import Reports
from paceline.wire.channels import open_channel
from paceline.wire.convert import draft_plan_from_proto, step_record_to_proto
from paceline.wire.tasks import end_if_cancelled
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)

REPORT_INTERVAL_S = 0.25
BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class PolicyLink:
    """Plans by drafter id, kept up by `run`.

    Args:
        snapshot: a report's identity and counts, without what `Reports` holds.
        longest: greatest sensible draft length; a plan beyond it is ignored.
        ignored: counts plans that were ignored, by the field at fault.
    """

    def __init__(
        self,
        address: str,
        *,
        snapshot: Callable[[], policy_pb2.SyncRequest],
        reports: Reports,
        longest: int,
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self.plans: dict[str, DraftPlan] = {}
        self.ignored: Counter[str] = Counter()
        self._address = address
        self._snapshot = snapshot
        self._reports = reports
        self._longest = longest
        self._interval_s = interval_s
        self._report = 0

    def plan(self, drafter_id: str) -> DraftPlan | None:
        return self.plans.get(drafter_id)

    async def run(self) -> None:
        """Keeps the stream up until cancelled."""
        backoff_s = BACKOFF_S
        while True:
            received = False
            reason = "closed"
            try:
                async with open_channel(self._address) as channel:
                    call = policy_pb2_grpc.PolicyStub(channel).Sync()
                    writer = asyncio.ensure_future(self._write(call))
                    try:
                        async for response in call:
                            received = True
                            self.take(response)
                    finally:
                        writer.cancel()
                        await asyncio.gather(writer, return_exceptions=True)
                        call.cancel()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Exception as error:  # noqa: BLE001 - supervised loop: logged, then tried again
                _log.exception("policy_link_failed")
                reason = repr(error)
            end_if_cancelled()
            if received:
                _log.warning("policy_lost", reason=reason)
                backoff_s = BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def take(self, response: policy_pb2.SyncResponse) -> None:
        """Keeps the plans that make sense."""
        for message in response.plans:
            plan = draft_plan_from_proto(message)
            fault = plan_fault(plan, self._longest)
            if fault is None:
                self.plans[plan.drafter_id] = plan
                continue
            if not self.ignored[fault]:
                _log.warning("plan_ignored", drafter=plan.drafter_id, field=fault)
            self.ignored[fault] += 1

    def next_report(self) -> policy_pb2.SyncRequest:
        self._report += 1
        message = self._snapshot()
        message.report = self._report
        message.interval_s = self._interval_s
        steps, drafts, requests = self._reports.take()
        message.steps.extend(step_record_to_proto(step) for step in steps)
        message.drafts.extend(tally.to_proto(drafter_id) for drafter_id, tally in drafts.items())
        message.requests.extend(requests)
        return message

    async def _write(self, call: Any) -> None:
        # What is reported is forgotten here, so only once somebody listens.
        await call.wait_for_connection()
        while True:
            await call.write(self.next_report())
            await asyncio.sleep(self._interval_s)
