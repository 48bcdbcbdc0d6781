"""The shared gRPC server and admin port over loopback."""

from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from paceline.core.errors import ErrorKind, PacelineError
from paceline.v1 import verifier_pb2, verifier_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.wire.admin import AdminServer
from paceline.wire.channels import open_channel
from paceline.wire.metrics import EngineMetrics, RequestMetrics
from paceline.wire.process import StartupError
from paceline.wire.server import GrpcServer
from paceline.wire.status import from_rpc_error, grpc_code, http_status
from paceline.wire.worker import PROTOCOL_VERSION, WorkerServicer

OVERLOADED = PacelineError(ErrorKind.OVERLOADED, "queue: full", field="queue", retry_after_s=1.5)


class FailingVerifier(verifier_pb2_grpc.VerifierServicer):
    async def Generate(
        self, request: verifier_pb2.VerifierGenerateRequest, context: object
    ) -> AsyncIterator[verifier_pb2.VerifierGenerateResponse]:
        yield verifier_pb2.VerifierGenerateResponse()
        raise OVERLOADED


async def no_drain(grace_s: float) -> int:
    return 0


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = GrpcServer()
    seen: list[worker_pb2.SetTestingRequest] = []
    describe = worker_pb2.DescribeResponse(id="w", protocol=PROTOCOL_VERSION)
    worker = WorkerServicer(lambda: describe, no_drain, seen.append, testing_allowed=True)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
    verifier_pb2_grpc.add_VerifierServicer_to_server(FailingVerifier(), server.grpc)
    yield await server.start("127.0.0.1", 0, ["paceline.v1.Worker", "paceline.v1.Verifier"])
    await server.stop(0)


async def test_typed_errors_cross_with_field_and_retry_delay(address: str) -> None:
    async with open_channel(address) as channel:
        call = verifier_pb2_grpc.VerifierStub(channel).Generate(verifier_pb2.VerifierGenerateRequest())
        received = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                received += 1
        assert received == 1
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(caught.value)
        assert (error.kind, error.message, error.field, error.retry_after_s) == (
            ErrorKind.OVERLOADED,
            "queue: full",
            "queue",
            1.5,
        )


@pytest.mark.parametrize("method", ["/paceline.v1.Worker/Describe", "/paceline.v1.Worker/SetTesting"])
async def test_malformed_bytes_are_the_callers_mistake(address: str, method: str) -> None:
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (worker_pb2.SetTestingRequest(slowdown=0.5), "slowdown"),
        (worker_pb2.SetTestingRequest(acceptance=1.5), "acceptance"),
        (worker_pb2.SetTestingRequest(rtt_ms=-1), "rtt_ms"),
    ],
)
async def test_testing_limits(address: str, request_: worker_pb2.SetTestingRequest, field: str) -> None:
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).SetTesting(request_)
        assert from_rpc_error(caught.value).field == field


async def test_another_protocol_version_is_refused_with_both_versions(address: str) -> None:
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(protocol=99))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "99" in (caught.value.details() or "")
        assert str(PROTOCOL_VERSION) in (caught.value.details() or "")


async def test_health_names_every_service(address: str) -> None:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "paceline.v1.Worker", "paceline.v1.Verifier"):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_taken_port_fails_at_start(address: str) -> None:
    other = GrpcServer()
    with pytest.raises(StartupError, match=address):
        await other.start("127.0.0.1", int(address.rsplit(":", 1)[1]), [])
    await other.stop(0)


async def test_admin_port_serves_health_and_the_contracts_metric_names() -> None:
    gateway, worker = CollectorRegistry(), CollectorRegistry()
    RequestMetrics(gateway, "m")
    EngineMetrics(worker, "m")
    names = {
        gateway: [
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:inter_token_latency_seconds_bucket",
            "vllm:e2e_request_latency_seconds_bucket",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:request_success_total",
            "paceline_leases",
        ],
        worker: [
            "vllm:kv_cache_usage_perc",
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "paceline_draft_length",
            "paceline_sessions",
        ],
    }
    for registry, wanted in names.items():
        admin = AdminServer(registry)
        url = await admin.start("127.0.0.1", 0)
        try:
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/health")).json() == {"status": "ok"}
                text = (await client.get(f"{url}/metrics")).text
        finally:
            await admin.stop()
        for name in wanted:
            assert f"\n{name}" in text, name


def test_every_error_kind_has_both_codes() -> None:
    table = {kind: (http_status(kind), grpc_code(kind)) for kind in ErrorKind}
    assert table[ErrorKind.OVERLOADED] == (429, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert table[ErrorKind.UNAVAILABLE] == (503, grpc.StatusCode.UNAVAILABLE)
    assert table[ErrorKind.CONTEXT_LENGTH_EXCEEDED] == (400, grpc.StatusCode.INVALID_ARGUMENT)
    assert table[ErrorKind.DEADLINE_EXCEEDED] == (504, grpc.StatusCode.DEADLINE_EXCEEDED)
