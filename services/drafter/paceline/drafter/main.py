"""Process of one drafter: builds its kind, serves, reports, drains."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter

from paceline.core.types import WorkerRole, WorkerState
from paceline.drafter.kinds import DraftKind
from paceline.drafter.ngram import NgramKind
from paceline.drafter.null import NullKind, TimedKind
from paceline.drafter.policy_link import PolicyLink
from paceline.drafter.rounds import BatchStats, Drafting
from paceline.drafter.servicer import DrafterServicer
from paceline.drafter.sessions import SessionTable
from paceline.drafter.suffix import SuffixKind
from paceline.v1 import drafter_pb2_grpc, policy_pb2, worker_pb2, worker_pb2_grpc
from paceline.wire.addresses import admin_port, connect_address, listen_port
from paceline.wire.admin import AdminServer
from paceline.wire.config import testing_allowed
from paceline.wire.convert import worker_role_to_proto, worker_state_to_proto
from paceline.wire.metrics import EngineMetrics
from paceline.wire.models import locate
from paceline.wire.process import ProcessContext
from paceline.wire.server import GrpcServer
from paceline.wire.settings import DrafterSettings, Settings
from paceline.wire.worker import PROTOCOL_VERSION, WorkerServicer

_STOP_GRACE_S = 1.0


def build_kind(settings: Settings, entry: DrafterSettings) -> DraftKind:
    """The configured kind. Loading a draft model blocks.

    Raises:
        ConfigError: the model whose vocabulary or weights it needs is not there.
    """
    if entry.kind == "ngram":
        return NgramKind()
    if entry.kind == "suffix":
        return SuffixKind()
    if entry.kind == "model":
        # torch is imported only by drafters that need it.
        from paceline.drafter.model import load_model_kind

        return load_model_kind(entry)
    vocab_size = locate(settings.model.target).vocab_size
    if entry.kind == "null":
        return NullKind(vocab_size)
    return TimedKind(vocab_size, settings.testing.timed.draft_ms / 1000)


class DrafterProcess:
    """One drafter's parts and what the other services may ask of it."""

    def __init__(self, context: ProcessContext, kind: DraftKind) -> None:
        self.settings = context.settings
        self.entry = context.settings.drafter(context.worker_id)
        self.kind = kind
        self.registry = CollectorRegistry()
        self._metrics = EngineMetrics(self.registry, self.entry.kind)
        self._proposals = Counter("paceline_proposals", "Proposals drafted.", registry=self.registry)
        self._tokens = Counter("paceline_draft_tokens", "Tokens proposed.", registry=self.registry)
        self._step_seconds = self._metrics.step_seconds.labels("draft")
        self.table = SessionTable(kind, max_sessions=self.entry.max_sessions)
        self._metrics.sessions.set_function(lambda: len(self.table))
        self.drafting = Drafting(
            kind,
            self.table,
            clock=time.monotonic,
            observe=self._observe,
            stale=lambda reason: self._metrics.stale_frames.labels(reason).inc(),
        )
        self.drafting.slowdown = self.entry.slowdown
        self.drafting.rtt_s = self.settings.testing.timed.rtt_ms / 1000
        self.servicer = DrafterServicer(self.table, self.drafting, time.monotonic)
        self.worker = WorkerServicer(self.describe, self.drain, self._set_testing, testing_allowed())
        self.incarnation = secrets.randbits(64)
        self.address = ""
        self.admin_url = ""
        # Read once: the files do not change under a running process.
        self._files = locate(self.entry.path) if self.entry.kind == "model" else None

    @property
    def _state(self) -> WorkerState:
        return WorkerState.DRAINING if self.servicer.draining else WorkerState.READY

    def describe(self) -> worker_pb2.DescribeResponse:
        files = self._files
        is_model = files is not None
        return worker_pb2.DescribeResponse(
            protocol=PROTOCOL_VERSION,
            id=self.entry.id,
            role=worker_role_to_proto(WorkerRole.DRAFTER),
            state=worker_state_to_proto(self._state),
            worker_incarnation=self.incarnation,
            pid=os.getpid(),
            version=metadata.version("paceline"),
            model=self.entry.path if is_model else "",
            tokenizer_fingerprint=files.tokenizer_fingerprint if files is not None else "",
            vocab_size=self.kind.vocab_size,
            max_context_tokens=self.kind.max_context_tokens,
            engine=self.entry.kind,
            device=self.entry.device if is_model else "",
            dtype=self.entry.dtype if is_model else "",
            max_sequences=self.entry.max_sessions,
            admin_url=self.admin_url,
        )

    def report(self) -> policy_pb2.SyncRequest:
        return policy_pb2.SyncRequest(
            worker_id=self.entry.id,
            role=worker_role_to_proto(WorkerRole.DRAFTER),
            state=worker_state_to_proto(self._state),
            worker_incarnation=self.incarnation,
            pid=os.getpid(),
            address=self.address,
            sessions=len(self.table),
            max_sequences=self.entry.max_sessions,
        )

    async def drain(self, grace_s: float) -> int:
        """Refuses new sessions and waits until none is left or the grace is over; returns those left."""
        self.servicer.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.servicer.idle.wait()
        except TimeoutError:
            pass
        return len(self.table)

    def _set_testing(self, request: worker_pb2.SetTestingRequest) -> None:
        if request.HasField("slowdown"):
            self.drafting.slowdown = request.slowdown
        if request.HasField("rtt_ms"):
            self.drafting.rtt_s = request.rtt_ms / 1000

    def _observe(self, stats: BatchStats) -> None:
        self._step_seconds.observe(stats.seconds)
        self._proposals.inc(stats.sessions)
        self._tokens.inc(stats.tokens)


async def serve(context: ProcessContext) -> None:
    """Runs a drafter until it is told to stop."""
    entry = context.settings.drafter(context.worker_id)
    kind = await asyncio.to_thread(build_kind, context.settings, entry)
    process = DrafterProcess(context, kind)
    server, admin = GrpcServer(), AdminServer(process.registry)
    drafter_pb2_grpc.add_DrafterServicer_to_server(process.servicer, server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(process.worker, server.grpc)
    link = PolicyLink(connect_address(context.settings.policy, "policy"), process.report)
    tasks: list[asyncio.Task[None]] = []
    try:
        process.admin_url = await admin.start(entry.host, admin_port(entry, "drafter"))
        services = ["paceline.v1.Drafter", "paceline.v1.Worker"]
        process.address = await server.start(entry.host, listen_port(entry, "drafter"), services)
        tasks = [asyncio.create_task(process.drafting.run()), asyncio.create_task(link.run())]
        context.ready(grpc=process.address, admin=process.admin_url)
        await _until_stopped(context, tasks)
        process.servicer.draining = True
        await server.set_serving(False)
        await context.drained(process.servicer.idle.wait(), context.settings.gateway.grace_s)
    finally:
        await server.stop(0 if context.aborting.is_set() else _STOP_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await admin.stop()
        kind.shutdown()


async def _until_stopped(context: ProcessContext, tasks: list[asyncio.Task[None]]) -> None:
    """Waits for the stop signal; a background task that ends before it is a failure, raised here."""
    stopping = asyncio.create_task(context.stopping.wait())
    try:
        await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        stopping.cancel()
