"""Process of one verifier: builds its engine, links to drafters and policy, serves, drains."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from prometheus_client import CollectorRegistry

from paceline.core.control import DraftRule
from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.types import DraftPlan, WorkerRole, WorkerState
from paceline.engine.null import NullRunner, TimedRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Runner
from paceline.v1 import policy_pb2, verifier_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.verifier.drafting import Drafting
from paceline.verifier.link import DrafterLink, LinkSettings, TargetIdentity
from paceline.verifier.policy_link import PolicyLink
from paceline.verifier.reports import Reports
from paceline.verifier.servicer import Served, VerifierServicer
from paceline.verifier.steps import StepLoop
from paceline.wire.addresses import admin_port, connect_address, listen_port
from paceline.wire.admin import AdminServer
from paceline.wire.config import testing_allowed
from paceline.wire.convert import worker_role_to_proto, worker_state_to_proto
from paceline.wire.metrics import EngineMetrics
from paceline.wire.models import ModelFiles, locate
from paceline.wire.process import ProcessContext, StartupError
from paceline.wire.server import GrpcServer
from paceline.wire.settings import Settings, VerifierSettings
from paceline.wire.worker import PROTOCOL_VERSION, WorkerServicer

STOP_GRACE_S = 1.0


def build_runner(settings: Settings, entry: VerifierSettings, files: ModelFiles) -> Runner:
    """The configured engine. Loading a model blocks.

    Raises:
        StartupError: the engine is not part of this build.
    """
    if entry.engine == "vllm":
        raise StartupError("engine vllm is not available in this build")
    if entry.engine == "torch":
        # torch is imported only where it computes.
        from paceline.engine.runner import TorchRunner

        return TorchRunner(
            files,
            dtype=entry.effective_dtype,
            device=entry.device,
            threads=entry.threads,
            max_sequences=entry.max_sequences,
            kv_cache_tokens=entry.kv_cache_tokens,
            exact=entry.exact,
            slowdown=entry.slowdown,
        )
    kv_cache_tokens = entry.kv_cache_tokens or entry.max_sequences * files.max_context_tokens
    runner: NullRunner
    if entry.engine == "null":
        runner = NullRunner(
            vocab_size=files.vocab_size,
            max_context_tokens=files.max_context_tokens,
            eos_token_ids=files.eos_token_ids,
            kv_cache_tokens=kv_cache_tokens,
        )
    else:
        timed = settings.testing.timed
        runner = TimedRunner(
            verify_s=timed.verify_ms * 1e-3,
            verify_token_s=timed.verify_token_ms * 1e-3,
            vocab_size=files.vocab_size,
            max_context_tokens=files.max_context_tokens,
            eos_token_ids=files.eos_token_ids,
            kv_cache_tokens=kv_cache_tokens,
        )
    runner.slowdown = entry.slowdown
    return runner


def draft_rule(settings: Settings) -> DraftRule:
    """``control.kind`` goes before ``speculation.k``; kinds that are plans of the policy follow its plans."""
    speculation, control = settings.speculation, settings.control
    fixed = None if speculation.k == "auto" else speculation.k
    if control.kind == "fixed" and control.arg is not None:
        fixed = int(control.arg)
    return DraftRule(speculation.enabled and control.kind != "off", fixed, speculation.k_max)


class VerifierProcess:
    """One verifier's parts and what the other services may ask of it."""

    def __init__(self, context: ProcessContext, runner: Runner, files: ModelFiles) -> None:
        settings = self.settings = context.settings
        entry = self.entry = settings.verifier(context.worker_id)
        self.runner = runner
        self.incarnation = secrets.randbits(64)
        self.address = ""
        self.admin_url = ""
        self.broken = asyncio.Event()
        self.exact = entry.exact or entry.engine in ("null", "timed")
        self._files = files
        clock = time.monotonic
        rule = draft_rule(settings)
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry, settings.model.served_name)
        reports = Reports()
        self.link_settings = LinkSettings()
        self.policy = PolicyLink(
            connect_address(settings.policy, "policy"),
            snapshot=self.report,
            reports=reports,
            longest=max(settings.speculation.k_max, rule.fixed_tokens or 0),
        )
        self.drafting = Drafting(
            links=[
                DrafterLink(
                    drafter.id,
                    drafter.kind,
                    connect_address(drafter, "drafter"),
                    target=TargetIdentity(files.tokenizer_fingerprint, runner.vocab_size),
                    settings=self.link_settings,
                    reports=reports,
                    news=lambda _: self.drafting.news.set(),
                    stale=lambda reason: self.metrics.stale_frames.labels(reason).inc(),
                    clock=clock,
                )
                for drafter in settings.drafters
            ],
            plans=self._plan,
            rule=rule,
            wait=settings.speculation.wait,
            clock=clock,
        )
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.scheduler = Scheduler(
            runner,
            max_sequences=entry.max_sequences,
            max_step_tokens=entry.max_step_tokens,
            prefix_cache=entry.prefix_cache,
        )
        self.steps = StepLoop(
            runner,
            self.scheduler,
            self.drafting,
            executor=self.executor,
            max_sequences=entry.max_sequences,
            reports=reports,
            metrics=self.metrics,
            clock=clock,
            synthetic_acceptance=settings.testing.synthetic_acceptance,
            integrity_check=entry.integrity_check,
            broken=self.broken.set,
        )
        served = Served(
            entry.id,
            self.incarnation,
            settings.model.served_name,
            self.exact,
            settings.gateway.stall_timeout_s,
            entry.max_step_tokens,
        )
        self.servicer = VerifierServicer(served, runner, self.steps, self.drafting, clock)
        self.worker = WorkerServicer(self.describe, self.drain, self.set_testing, testing_allowed())
        self._gauges()

    def start(self) -> list[asyncio.Task[None]]:
        """Begins all that runs beside the servers; its owner cancels the tasks."""
        links = [link.run() for link in self.drafting.links]
        return [asyncio.create_task(run) for run in (self.steps.run(), self.policy.run(), *links)]

    @property
    def state(self) -> WorkerState:
        if self.broken.is_set():
            return WorkerState.LOST
        return WorkerState.READY if self.servicer.accepting else WorkerState.DRAINING

    def describe(self) -> worker_pb2.DescribeResponse:
        blocks = self.scheduler.blocks
        return worker_pb2.DescribeResponse(
            protocol=PROTOCOL_VERSION,
            id=self.entry.id,
            role=worker_role_to_proto(WorkerRole.VERIFIER),
            state=worker_state_to_proto(self.state),
            worker_incarnation=self.incarnation,
            pid=os.getpid(),
            version=metadata.version("paceline"),
            model=self.settings.model.served_name,
            tokenizer_fingerprint=self._files.tokenizer_fingerprint,
            vocab_size=self.runner.vocab_size,
            max_context_tokens=self.scheduler.max_context_tokens,
            engine=self.entry.engine,
            device=self.entry.device if self.entry.engine == "torch" else "",
            dtype=self.entry.effective_dtype if self.entry.engine == "torch" else "",
            exact=self.exact,
            max_sequences=self.entry.max_sequences,
            kv_cache_tokens=blocks.total * blocks.block_tokens,
            synthetic=self.steps.synthetic_acceptance is not None,
            admin_url=self.admin_url,
        )

    def report(self) -> policy_pb2.SyncRequest:
        blocks = self.scheduler.blocks
        return policy_pb2.SyncRequest(
            worker_id=self.entry.id,
            role=worker_role_to_proto(WorkerRole.VERIFIER),
            state=worker_state_to_proto(self.state),
            worker_incarnation=self.incarnation,
            pid=os.getpid(),
            address=self.address,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            sessions=sum(len(link.sessions) for link in self.drafting.links),
            blocks_used=blocks.used,
            blocks_total=blocks.total,
            max_sequences=self.entry.max_sequences,
        )

    async def drain(self, grace_s: float) -> int:
        """Refuses new choices and waits until none is left or the grace is over; returns those left."""
        self.servicer.accepting = False
        try:
            async with asyncio.timeout(grace_s):
                await self.steps.idle()
        except TimeoutError:
            pass
        return len(self.steps.choices)

    def set_testing(self, request: worker_pb2.SetTestingRequest) -> None:
        if request.HasField("slowdown"):
            self.runner.slowdown = request.slowdown
        if request.HasField("acceptance"):
            self.steps.synthetic_acceptance = request.acceptance if request.acceptance >= 0 else None
        if request.HasField("rtt_ms"):
            self.link_settings.delay_s = request.rtt_ms * 1e-3
        if request.nan_request:
            self.servicer.fail_next(request.nan_request)

    def _plan(self, drafter_id: str) -> DraftPlan | None:
        return self.policy.plan(drafter_id)

    def _gauges(self) -> None:
        """Read when scraped."""
        blocks, metrics = self.scheduler.blocks, self.metrics
        metrics.running.set_function(lambda: self.scheduler.running)
        metrics.waiting.set_function(lambda: self.scheduler.waiting)
        metrics.kv_usage.set_function(lambda: blocks.used / blocks.total)
        metrics.kv_blocks.labels("used").set_function(lambda: blocks.used)
        metrics.kv_blocks.labels("cached").set_function(lambda: blocks.cached)
        metrics.kv_blocks.labels("free").set_function(lambda: blocks.free - blocks.cached)
        metrics.sessions.set_function(lambda: sum(len(link.sessions) for link in self.drafting.links))


async def serve(context: ProcessContext) -> None:
    """Runs a verifier until it is told to stop."""
    entry = context.settings.verifier(context.worker_id)
    files = locate(context.settings.model.target)
    runner = await asyncio.to_thread(build_runner, context.settings, entry, files)
    process = VerifierProcess(context, runner, files)
    server, admin = GrpcServer(), AdminServer(process.registry)
    verifier_pb2_grpc.add_VerifierServicer_to_server(process.servicer, server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(process.worker, server.grpc)
    tasks: list[asyncio.Task[None]] = []
    try:
        process.admin_url = await admin.start(entry.host, admin_port(entry, "verifier"))
        services = ["paceline.v1.Verifier", "paceline.v1.Worker"]
        process.address = await server.start(entry.host, listen_port(entry, "verifier"), services)
        tasks = process.start()
        context.ready(grpc=process.address, admin=process.admin_url)
        await _until_stopped(context, process, server)
        process.servicer.accepting = False
        await server.set_serving(False)
        await context.drained(process.steps.idle(), context.settings.gateway.grace_s)
    finally:
        await server.stop(0 if context.aborting.is_set() else STOP_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await admin.stop()
        process.executor.shutdown(cancel_futures=True)
        runner.close()


async def _until_stopped(context: ProcessContext, process: VerifierProcess, server: GrpcServer) -> None:
    """Waits for the stop signal.

    Raises:
        PacelineError: the engine broke. Its requests have been told; the process ends, to be started again.
    """
    stopping = asyncio.ensure_future(context.stopping.wait())
    broken = asyncio.ensure_future(process.broken.wait())
    try:
        await asyncio.wait({stopping, broken}, return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            await server.set_serving(False)
            raise PacelineError(ErrorKind.INTERNAL, "the engine failed")
    finally:
        stopping.cancel()
        broken.cancel()
        await asyncio.gather(stopping, broken, return_exceptions=True)
