"""Reports to the policy service; drafting never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from paceline.v1 import policy_pb2, policy_pb2_grpc
from paceline.wire.channels import open_channel
from paceline.wire.tasks import end_if_cancelled
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)

REPORT_INTERVAL_S = 0.5
_RETRY_S = 0.5


class PolicyLink:
    """Sends a report every half second while the policy can be reached.

    Args:
        address: ``host:port`` of the policy service.
        report: the report of now, but for ``report`` and ``interval_s``, which are filled in here.
    """

    def __init__(self, address: str, report: Callable[[], policy_pb2.SyncRequest]) -> None:
        self._address = address
        self._report = report
        self._count = 0

    async def run(self) -> None:
        """Reconnects until cancelled."""
        async with open_channel(self._address) as channel:
            stub = policy_pb2_grpc.PolicyStub(channel)
            connected = False
            while True:
                call = stub.Sync(self._reports())
                try:
                    async for _ in call:  # plans are for verifiers
                        connected = True
                except grpc.aio.AioRpcError as error:
                    if connected:
                        _log.warning("policy_lost", reason=error.details())
                    connected = False
                finally:
                    call.cancel()
                end_if_cancelled()
                await asyncio.sleep(_RETRY_S)

    async def _reports(self) -> AsyncIterator[policy_pb2.SyncRequest]:
        while True:
            self._count += 1
            report = self._report()
            report.report = self._count
            report.interval_s = REPORT_INTERVAL_S
            yield report
            await asyncio.sleep(REPORT_INTERVAL_S)
