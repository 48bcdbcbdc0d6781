"""Process of the gateway: queue, workers, both APIs, drain."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry

from paceline.core.errors import ErrorKind, PacelineError
from paceline.gateway.admin_api import AdminApi
from paceline.gateway.fleet import Expected, Fleet
from paceline.gateway.grpc_api import SERVICE, InferenceServicer
from paceline.gateway.openai_http import OpenAiApi
from paceline.gateway.policy_link import PolicyLink
from paceline.gateway.queue import AdmissionQueue, EmbeddedRedis, connect
from paceline.gateway.service import DRAIN_RETRY_AFTER_S, Gateway
from paceline.v1 import inference_pb2_grpc
from paceline.wire.addresses import connect_address
from paceline.wire.admin import AdminServer, HttpServer
from paceline.wire.metrics import RequestMetrics
from paceline.wire.models import locate
from paceline.wire.process import ProcessContext, StartupError
from paceline.wire.server import GrpcServer
from paceline.wire.settings import GatewaySettings, Settings
from paceline.wire.telemetry import get_logger

FIRST_VERIFIER_TIMEOUT_S = 300.0
_PROGRESS_S = 5.0
_DEFAULT_PORT, _DEFAULT_GRPC_PORT, _DEFAULT_ADMIN_PORT = 8000, 8001, 9000
_STOP_GRACE_S = 1.0
_log = get_logger(__name__)


async def serve(context: ProcessContext) -> None:
    """Runs the gateway until it is told to stop, then drains it.

    Raises:
        StartupError, ConfigError: it cannot start; the message says why.
    """
    settings = context.settings
    expected = Expected(settings.model.served_name, locate(settings.model.target))
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, settings.model.served_name)
    async with contextlib.AsyncExitStack() as stack:
        url, queue = await stack.enter_async_context(_queue(context))
        fleet = Fleet(
            {v.id: connect_address(v, "verifier") for v in settings.verifiers},
            {d.id: connect_address(d, "drafter") for d in settings.drafters},
            expected,
        )
        stack.push_async_callback(fleet.close)
        policy = PolicyLink(connect_address(settings.policy, "policy"), on_table=fleet.changed.set)
        stack.push_async_callback(policy.close)
        gateway = Gateway(settings, expected, fleet, policy, queue, metrics)
        await stack.enter_async_context(_running(gateway))
        http = HttpServer(OpenAiApi(gateway, registry).app())
        grpc = GrpcServer()
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(gateway), grpc.grpc)
        admin = AdminServer(registry, AdminApi(gateway).routes())
        stack.push_async_callback(admin.stop)
        stack.push_async_callback(grpc.stop, _STOP_GRACE_S)
        stack.push_async_callback(http.stop)
        limits = settings.gateway
        admin_url = await admin.start(limits.host, _port(limits, limits.admin_port, _DEFAULT_ADMIN_PORT))
        grpc_address = await grpc.start(
            limits.host, _port(limits, limits.grpc_port, _DEFAULT_GRPC_PORT), [SERVICE]
        )
        http_url = await http.start(limits.host, limits.port)
        if not await _first_verifier(context, gateway):
            return
        context.ready(http=http_url, grpc=grpc_address, admin=admin_url, redis=url)
        await context.stopping.wait()
        await _drain(context, gateway, grpc)


def _port(limits: GatewaySettings, configured: int | None, default: int) -> int:
    if configured is not None:
        return configured
    return default if limits.port == _DEFAULT_PORT else 0


@contextlib.asynccontextmanager
async def _queue(context: ProcessContext) -> AsyncIterator[tuple[str, AdmissionQueue]]:
    """The queue's URL and client; an embedded server where no URL is configured."""
    settings: Settings = context.settings
    async with contextlib.AsyncExitStack() as stack:
        url = settings.queue.url
        if not url:
            url = (await stack.enter_async_context(EmbeddedRedis(context.run_dir))).url
        client = connect(url)
        stack.push_async_callback(client.aclose)
        queue = AdmissionQueue(
            client,
            model=settings.model.served_name,
            owner=secrets.token_hex(8),
            max_requests=settings.queue.max_requests,
            max_tokens=settings.queue.max_tokens,
            lease_s=settings.queue.lease_s,
        )
        await queue.check_server()
        yield url, queue


@contextlib.asynccontextmanager
async def _running(gateway: Gateway) -> AsyncIterator[None]:
    """The gateway's loops."""
    tasks = [
        asyncio.create_task(gateway.fleet.keep()),
        asyncio.create_task(gateway.policy.watch()),
        asyncio.create_task(gateway.dispatcher.run()),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first_verifier(context: ProcessContext, gateway: Gateway) -> bool:
    """Waits until a verifier is connected; False if the process is told to stop before."""
    started_s = asyncio.get_running_loop().time()
    while not gateway.fleet.ready:
        waited_s = asyncio.get_running_loop().time() - started_s
        if waited_s > FIRST_VERIFIER_TIMEOUT_S:
            known = ", ".join(f"{v.id} at {v.address}" for v in gateway.fleet.verifiers) or "none configured"
            raise StartupError(f"no verifier connected within {FIRST_VERIFIER_TIMEOUT_S:g} s: {known}")
        _log.info("waiting_for_verifier", waited_s=round(waited_s))
        arrived = asyncio.ensure_future(gateway.fleet.any_ready.wait())
        stopping = asyncio.ensure_future(context.stopping.wait())
        try:
            await asyncio.wait({arrived, stopping}, timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()
            stopping.cancel()
        if context.stopping.is_set():
            return False
    return True


async def _drain(context: ProcessContext, gateway: Gateway, grpc: GrpcServer) -> None:
    """No new requests; live ones end by themselves, or with an error once the grace is over."""
    gateway.draining = True
    await grpc.set_serving(False)
    grace_s = context.settings.gateway.grace_s
    _log.info("draining", live=len(gateway.dispatcher.live), grace_s=grace_s)
    if not await context.drained(gateway.dispatcher.drained(), grace_s):
        gateway.dispatcher.abort_all(
            PacelineError(
                ErrorKind.UNAVAILABLE,
                "the server is stopping and its grace for running requests is over",
                retry_after_s=DRAIN_RETRY_AFTER_S,
            )
        )
        await context.drained(gateway.dispatcher.drained(), _STOP_GRACE_S)
