"""The Worker service that verifiers and drafters share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from paceline.core.errors import ErrorKind, PacelineError, invalid
from paceline.v1 import worker_pb2, worker_pb2_grpc

PROTOCOL_VERSION = 1


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Describe, Drain and SetTesting over the role's own functions."""

    def __init__(
        self,
        describe: Callable[[], worker_pb2.DescribeResponse],
        drain: Callable[[float], Awaitable[int]],
        set_testing: Callable[[worker_pb2.SetTestingRequest], None],
        testing_allowed: bool,
    ) -> None:
        self._describe = describe
        self._drain = drain
        self._set_testing = set_testing
        self._testing_allowed = testing_allowed

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Any
    ) -> worker_pb2.DescribeResponse:
        if request.protocol != PROTOCOL_VERSION:
            raise PacelineError(
                ErrorKind.FAILED_PRECONDITION,
                f"protocol: version {request.protocol} is not spoken here, want {PROTOCOL_VERSION}",
                field="protocol",
            )
        return self._describe()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        if not 0 <= request.grace_s <= 86_400:
            raise invalid("grace_s", "must be from 0 to 86400")
        return worker_pb2.DrainResponse(unfinished=await self._drain(request.grace_s))

    async def SetTesting(
        self, request: worker_pb2.SetTestingRequest, context: Any
    ) -> worker_pb2.SetTestingResponse:
        if not self._testing_allowed:
            raise PacelineError(ErrorKind.FAILED_PRECONDITION, "testing: refused unless PACELINE_TESTING=1")
        if request.HasField("slowdown") and not 1 <= request.slowdown <= 1000:
            raise invalid("slowdown", "must be from 1 to 1000")
        if request.HasField("acceptance") and not request.acceptance <= 1:
            raise invalid("acceptance", "must be at most 1 (negative clears it)")
        if request.HasField("rtt_ms") and not 0 <= request.rtt_ms <= 10_000:
            raise invalid("rtt_ms", "must be from 0 to 10000")
        self._set_testing(request)
        return worker_pb2.SetTestingResponse()
