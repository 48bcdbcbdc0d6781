"""A whole drafter as its process runs it: ready line, Describe, reports, metrics, testing, drain."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from paceline.core.tokens import prefix_hash
from paceline.drafter.main import serve
from paceline.v1 import (
    common_pb2,
    drafter_pb2,
    drafter_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from paceline.wire.channels import open_channel
from paceline.wire.process import ProcessContext, StartupError
from paceline.wire.server import GrpcServer
from paceline.wire.settings import DrafterSettings, GatewaySettings, PolicySettings, Settings


class RecordingPolicy(policy_pb2_grpc.PolicyServicer):
    """Answers each report with a plan, and ends the first call after its first report."""

    def __init__(self) -> None:
        self.reports = asyncio.Queue[policy_pb2.SyncRequest]()
        self.calls = 0

    async def Sync(
        self, request_iterator: AsyncIterator[policy_pb2.SyncRequest], context: object
    ) -> AsyncIterator[policy_pb2.SyncResponse]:
        self.calls += 1
        async for report in request_iterator:
            self.reports.put_nowait(report)
            yield policy_pb2.SyncResponse()
            if self.calls == 1:
                return


@dataclass
class Running:
    context: ProcessContext
    grpc: str
    admin: str
    policy: RecordingPolicy
    task: asyncio.Task[None]


def settings_of(policy: str, **drafter: object) -> Settings:
    return Settings(
        drafters=(DrafterSettings(port=0, admin_port=0, **drafter),),  # type: ignore[arg-type]
        policy=PolicySettings(addr=policy),
        gateway=GatewaySettings(grace_s=20.0),
    )


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setenv("PACELINE_TESTING", "1")
    policy, server = RecordingPolicy(), GrpcServer()
    policy_pb2_grpc.add_PolicyServicer_to_server(policy, server.grpc)
    address = await server.start("127.0.0.1", 0, ["paceline.v1.Policy"])
    ready = asyncio.Event()

    class Context(ProcessContext):
        def ready(self, **addresses: str) -> None:
            super().ready(**addresses)
            ready.set()

    context = Context(settings_of(address, kind="ngram"), "d0", "drafter", tmp_path)
    task = asyncio.create_task(serve(context))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task.exception()
    state = json.loads((tmp_path / "state.json").read_text())
    yield Running(context, state["grpc"], state["admin"], policy, task)
    context.stopping.set()
    context.aborting.set()
    await task
    await server.stop(0)


def open_request(session_id: int, tokens: list[int]) -> drafter_pb2.SessionsRequest:
    sampling = drafter_pb2.DraftSampling(
        params=common_pb2.SamplingParams(), noise_key=1, prompt_tokens=len(tokens)
    )
    chunk = drafter_pb2.OpenSession(
        session_id=session_id,
        session_gen=1,
        total_tokens=len(tokens),
        token_ids=tokens,
        sampling=sampling,
    )
    return drafter_pb2.SessionsRequest(open=chunk)


async def test_describe_reports_metrics_and_testing(running: Running) -> None:
    tokens = [1, 2, 3, 4, 1, 2]
    async with open_channel(running.grpc) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        described = await worker.Describe(worker_pb2.DescribeRequest(protocol=1))
        assert (described.id, described.engine, described.vocab_size) == ("d0", "ngram", 0)
        assert described.role == worker_pb2.WORKER_ROLE_DRAFTER
        assert described.state == worker_pb2.WORKER_STATE_READY
        assert described.admin_url == running.admin

        await worker.SetTesting(worker_pb2.SetTestingRequest(slowdown=1.5, rtt_ms=5))
        stub = drafter_pb2_grpc.DrafterStub(channel)
        sessions = stub.Sessions()
        await sessions.write(open_request(1, tokens))
        assert (await sessions.read()).opened.length == 6
        commit = drafter_pb2.SessionCommit(
            session_id=1, session_gen=1, base_length=6, prefix_hash=prefix_hash(tokens), ask_tokens=5
        )
        call = stub.Rounds(iter([drafter_pb2.RoundsRequest(frame=1, commits=[commit])]))
        answers = [list(response.proposals[0].token_ids) async for response in call]
        assert answers == [[3, 4, 1, 2, 3]]

        async with asyncio.timeout(30):
            report = await running.policy.reports.get()
            while not report.sessions or running.policy.calls < 2:
                report = await running.policy.reports.get()
        assert (report.worker_id, report.address, report.sessions) == ("d0", running.grpc, 1)
        assert report.role == worker_pb2.WORKER_ROLE_DRAFTER
        assert report.worker_incarnation == described.worker_incarnation
        assert report.report > 1

        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{running.admin}/metrics")).text
        assert "\npaceline_sessions 1.0" in text
        assert '\npaceline_step_seconds_count{part="draft"} 1.0' in text
        assert "\npaceline_proposals_total 1.0" in text
        assert "\npaceline_draft_tokens_total 5.0" in text
        sessions.cancel()


async def test_drain_refuses_new_sessions_and_waits_for_the_open_ones(running: Running) -> None:
    async with open_channel(running.grpc) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        stub = drafter_pb2_grpc.DrafterStub(channel)
        rounds, sessions = stub.Rounds(), stub.Sessions()
        try:
            await sessions.write(open_request(1, [1, 2]))
            assert (await sessions.read()).opened.length == 2
            await rounds.write(
                drafter_pb2.RoundsRequest(
                    frame=1, commits=[drafter_pb2.SessionCommit(session_id=1, session_gen=1)]
                )
            )
            await rounds.read()
            assert (await worker.Drain(worker_pb2.DrainRequest(grace_s=0.01))).unfinished == 1
            await sessions.write(open_request(2, [1, 2]))
            assert "draining" in (await sessions.read()).refused.reason
            described = await worker.Describe(worker_pb2.DescribeRequest(protocol=1))
            assert described.state == worker_pb2.WORKER_STATE_DRAINING
            draining = worker.Drain(worker_pb2.DrainRequest(grace_s=60))
            await sessions.write(drafter_pb2.SessionsRequest(close=drafter_pb2.CloseSession(session_id=1)))
            assert (await draining).unfinished == 0
        finally:
            rounds.cancel()
            sessions.cancel()


async def test_a_stop_signal_ends_the_process_once_no_session_is_open(running: Running) -> None:
    running.context.stopping.set()
    async with asyncio.timeout(30):
        await running.task
    async with open_channel(running.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(protocol=1))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_taken_port_fails_the_start(running: Running, tmp_path: Path) -> None:
    settings = settings_of("127.0.0.1:1", kind="ngram")
    port = int(running.grpc.rsplit(":", 1)[1])
    taken = settings.model_copy(
        update={"drafters": (settings.drafters[0].model_copy(update={"port": port}),)}
    )
    with pytest.raises(StartupError, match=str(port)):
        await serve(ProcessContext(taken, "d0", "drafter", tmp_path))
