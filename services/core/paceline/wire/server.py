"""A gRPC server as every role runs it: health, reflection, limits, keepalive, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from paceline.core.errors import ErrorKind, PacelineError
from paceline.wire.channels import MAX_MESSAGE_BYTES
from paceline.wire.process import StartupError
from paceline.wire.status import grpc_code, trailing_metadata
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)

STOP_SLACK_S = 5.0


class _Malformed:
    """Stands for a request that could not be decoded, until the handler answers INVALID_ARGUMENT."""


_MALFORMED = _Malformed()


async def _abort(context: Any, error: PacelineError) -> None:
    context.set_trailing_metadata(trailing_metadata(error))
    await context.abort(grpc_code(error.kind), error.message)


def _malformed() -> PacelineError:
    return PacelineError(ErrorKind.INVALID_ARGUMENT, "request: malformed protobuf message")


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _MALFORMED

    return decode


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is _MALFORMED:
            raise _malformed()
        yield request


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps PacelineError to status and details, and undecodable bytes to INVALID_ARGUMENT.

    grpc.aio answers UNKNOWN for both on its own.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        streams_in = handler.request_streaming

        def prepare(request: Any) -> Any:
            if streams_in:
                return _checked(request)
            if request is _MALFORMED:
                raise _malformed()
            return request

        if handler.response_streaming:
            inner_stream = handler.stream_stream if streams_in else handler.unary_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    async for response in inner_stream(prepare(request), context):
                        yield response
                except PacelineError as error:
                    await _abort(context, error)

            make = (
                grpc.stream_stream_rpc_method_handler if streams_in else grpc.unary_stream_rpc_method_handler
            )
            behavior: Any = stream
        else:
            inner_unary = handler.stream_unary if streams_in else handler.unary_unary

            async def unary(request: Any, context: Any) -> Any:
                try:
                    return await inner_unary(prepare(request), context)
                except PacelineError as error:
                    await _abort(context, error)

            make = grpc.stream_unary_rpc_method_handler if streams_in else grpc.unary_unary_rpc_method_handler
            behavior = unary
        return make(
            behavior,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


class GrpcServer:
    """Add servicers to ``grpc``, then `start`. One a process; handlers run on the process's event loop."""

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.grpc = grpc.aio.server(
            interceptors=[_ErrorInterceptor()],
            options=[
                # A second process on the same port must fail at start, not share the traffic.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                # Strictly below the clients' interval, else long silent generations end in GOAWAY.
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ],
        )
        self._health = HealthServicer()
        self._services: tuple[str, ...] = ()

    async def start(self, host: str, port: int, services: Sequence[str]) -> str:
        """Binds and serves; ``services`` are fully qualified names for health and reflection.

        Returns:
            ``host:port`` with the bound port.

        Raises:
            StartupError: the address cannot be bound.
        """
        self._services = tuple(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (
            *services,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, self.grpc)
        try:
            bound = self.grpc.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise StartupError(f"gRPC cannot listen on {host}:{port}: {error}") from None
        if bound == 0:
            raise StartupError(f"gRPC cannot listen on {host}:{port}")
        await self.grpc.start()
        await self.set_serving(True)
        return f"{host}:{bound}"

    async def set_serving(self, serving: bool) -> None:
        """Readiness of the services; liveness (``""``) stays SERVING until `stop`."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        for service in self._services:
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Ends running calls after ``grace_s``; returns soon after, even if one will not end."""
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace_s + STOP_SLACK_S):
                await self.grpc.stop(grace_s)
        except TimeoutError:
            _log.error("grpc_stop_timed_out", grace_s=grace_s)
