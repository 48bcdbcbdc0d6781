"""The policy process."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from paceline.policy.admin import FleetCollector, routes
from paceline.policy.fleet import Fleet
from paceline.policy.planner import Control
from paceline.policy.servicer import PolicyServicer
from paceline.v1 import policy_pb2, policy_pb2_grpc
from paceline.wire.addresses import admin_port, listen_port
from paceline.wire.admin import AdminServer
from paceline.wire.process import ProcessContext
from paceline.wire.server import GrpcServer

STOP_GRACE_S = 1.0


async def serve(context: ProcessContext) -> None:
    """Runs until told to stop; nothing is kept, so draining is immediate.

    Raises:
        ConfigError: the configured control is not available.
        StartupError: an address is taken.
    """
    settings = context.settings
    fleet = Fleet(
        Control.from_settings(settings),
        clock=time.monotonic,
        drafters=[drafter.id for drafter in settings.drafters],
        chunk_tokens=settings.engine.max_step_tokens,
    )
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet))
    servicer = PolicyServicer(fleet)
    server = GrpcServer()
    policy_pb2_grpc.add_PolicyServicer_to_server(servicer, server.grpc)
    admin = AdminServer(registry, routes(fleet))
    listen = settings.policy
    planning = asyncio.create_task(servicer.run())
    try:
        admin_url = await admin.start(listen.host, admin_port(listen, "policy"))
        service = policy_pb2.DESCRIPTOR.services_by_name["Policy"].full_name
        address = await server.start(listen.host, listen_port(listen, "policy"), [service])
        context.ready(grpc=address, admin=admin_url)
        await context.stopping.wait()
    finally:
        servicer.stop()
        planning.cancel()
        await asyncio.gather(planning, return_exceptions=True)
        await server.stop(STOP_GRACE_S)
        await admin.stop()
