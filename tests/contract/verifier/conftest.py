"""A verifier over loopback with the null engine, and drafters scripted in the test."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.noise import Domain, noise_key
from paceline.core.nullmodel import null_token
from paceline.core.tokens import prefix_hash
from paceline.engine.null import NullRunner
from paceline.engine.step import ItemResult, StepPlan
from paceline.v1 import (
    common_pb2,
    drafter_pb2,
    drafter_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from paceline.verifier.main import VerifierProcess
from paceline.wire.channels import open_channel
from paceline.wire.models import ModelFiles
from paceline.wire.process import ProcessContext
from paceline.wire.server import GrpcServer
from paceline.wire.settings import Settings
from paceline.wire.worker import PROTOCOL_VERSION, WorkerServicer

VOCAB = 5000
MODEL = "test-model"
FINGERPRINT = "f" * 64


class ScriptedDrafter(drafter_pb2_grpc.DrafterServicer):
    """Drafts by the null rule; ``answer`` may be replaced. Counts what it saw and did."""

    def __init__(self) -> None:
        self.sessions: dict[int, Any] = {}
        self.seen: Counter[str] = Counter()
        self.describe = worker_pb2.DescribeResponse(
            protocol=PROTOCOL_VERSION,
            role=worker_pb2.WORKER_ROLE_DRAFTER,
            state=worker_pb2.WORKER_STATE_READY,
            engine="null",
            vocab_size=VOCAB,
        )
        self.server = GrpcServer()
        self.address = ""

    async def start(self, port: int = 0) -> str:
        async def drain(_: float) -> int:
            return 0

        worker = WorkerServicer(lambda: self.describe, drain, lambda _: None, testing_allowed=False)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, self.server.grpc)
        drafter_pb2_grpc.add_DrafterServicer_to_server(self, self.server.grpc)
        self.address = await self.server.start("127.0.0.1", port, ["paceline.v1.Drafter"])
        return self.address

    async def Sessions(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.SessionsResponse]:
        async for request in requests:
            if request.HasField("close"):
                self.seen["close"] += 1
                self.sessions.pop(request.close.session_id, None)
                continue
            chunk = request.open
            if chunk.offset == 0:
                self.seen["open"] += 1
                sampling = chunk.sampling
                self.sessions[chunk.session_id] = SimpleNamespace(
                    generation=chunk.session_gen,
                    prompt_tokens=sampling.prompt_tokens,
                    noise_key=sampling.noise_key,
                    tokens=[],
                )
            session = self.sessions[chunk.session_id]
            session.tokens += chunk.token_ids
            self.seen["longest_chunk"] = max(self.seen["longest_chunk"], len(chunk.token_ids))
            if len(session.tokens) == chunk.total_tokens:
                opened = drafter_pb2.SessionOpened(
                    session_id=chunk.session_id, session_gen=chunk.session_gen, length=chunk.total_tokens
                )
                yield drafter_pb2.SessionsResponse(opened=opened)

    async def Rounds(self, requests: Any, context: Any) -> AsyncIterator[drafter_pb2.RoundsResponse]:
        async for request in requests:
            self.seen["frames"] += 1
            proposals: list[drafter_pb2.SessionProposal] = []
            for commit in request.commits:
                proposals += await self.answer(commit)
            yield drafter_pb2.RoundsResponse(frame=request.frame, hold_us=1, proposals=proposals)

    async def answer(self, commit: drafter_pb2.SessionCommit) -> list[drafter_pb2.SessionProposal]:
        return [self.good(commit)]

    def good(self, commit: drafter_pb2.SessionCommit) -> drafter_pb2.SessionProposal:
        """The right answer, after checking the commit as a drafter must."""
        session = self.sessions.get(commit.session_id)
        proposal = drafter_pb2.SessionProposal(
            session_id=commit.session_id,
            session_gen=commit.session_gen,
            status=drafter_pb2.PROPOSAL_STATUS_OK,
            ask_tokens=commit.ask_tokens,
            compute_us=1,
        )
        if session is None or session.generation != commit.session_gen:
            proposal.status = drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION
            return proposal
        known = session.tokens[commit.base_length :]
        if prefix_hash(session.tokens[: commit.base_length]) != commit.prefix_hash or known != list(
            commit.token_ids[: len(known)]
        ):
            proposal.status = drafter_pb2.PROPOSAL_STATUS_PREFIX_MISMATCH
            return proposal
        session.tokens += commit.token_ids[len(known) :]
        proposal.base_length = len(session.tokens)
        proposal.prefix_hash = prefix_hash(session.tokens)
        previous = session.tokens[-1]
        for index in range(commit.ask_tokens):
            position = len(session.tokens) + index - session.prompt_tokens
            previous = null_token(session.noise_key, position, previous, VOCAB)
            proposal.token_ids.append(previous)
        return proposal


class GatedRunner(NullRunner):
    """The null engine, with ways to stop it between steps and to make it raise."""

    def __init__(self) -> None:
        super().__init__(
            vocab_size=VOCAB, max_context_tokens=40_000, eos_token_ids=frozenset({2}), kv_cache_tokens=1 << 17
        )
        self.explode = False
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = False

    def execute(self, plan: StepPlan) -> list[ItemResult]:
        self.waiting = True
        self.gate.wait(20)
        self.waiting = False
        if self.explode:
            raise RuntimeError("device lost")
        return super().execute(plan)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    started: Any = None
    finished: Any = None


@dataclass
class Verifier:
    process: VerifierProcess
    runner: GatedRunner
    server: GrpcServer
    stub: Any
    worker: Any

    async def ask(self, **fields: Any) -> Answer:
        return await collect(self.stub.Generate(request(**fields)))

    def stale(self) -> dict[str, float]:
        samples = [s for m in self.process.metrics.stale_frames.collect() for s in m.samples]
        return {s.labels["reason"]: s.value for s in samples if s.name.endswith("_total")}

    def check_idle(self) -> None:
        scheduler = self.process.scheduler
        assert (scheduler.running, scheduler.waiting, scheduler.blocks.used) == (0, 0, 0)
        scheduler.check_integrity()


def request(
    *,
    request_id: str = "r",
    prompt: list[int] | None = None,
    committed: list[int] | None = None,
    epoch: int = 0,
    choice: int = 0,
    speculation: Any = None,
    model: str = MODEL,
    **sampling: Any,
) -> verifier_pb2.VerifierGenerateRequest:
    fields: dict[str, Any] = {"temperature": 0.0, "seed": 7, "max_tokens": 200, **sampling}
    return verifier_pb2.VerifierGenerateRequest(
        request_id=request_id,
        choice_index=choice,
        model=model,
        prompt_token_ids=prompt or PROMPT,
        committed_token_ids=committed or [],
        sampling=common_pb2.SamplingParams(**fields),
        speculation=speculation or common_pb2.SpeculationOptions(),
        grant_epoch=epoch,
    )


PROMPT = list(range(100, 140))


def chain(count: int, *, seed: int = 7, choice: int = 0, prompt: list[int] | None = None) -> list[int]:
    """Direct iteration of the documented rule."""
    prompt = prompt or PROMPT
    key = noise_key(seed, choice, prompt, Domain.TARGET)
    tokens, previous = [], prompt[-1]
    for position in range(count):
        previous = null_token(key, position, previous, VOCAB)
        tokens.append(previous)
    return tokens


async def collect(call: Any) -> Answer:
    answer = Answer()
    async for response in call:
        match response.WhichOneof("event"):
            case "started":
                assert answer.started is None
                answer.started = response.started
            case "tokens":
                answer.offsets.append(response.tokens.offset)
                answer.tokens += response.tokens.token_ids
            case "finished":
                answer.finished = response.finished
    return answer


def check_receipt(receipt: Any) -> None:
    parts = receipt.verified_tokens + receipt.pruned_tokens + receipt.late_tokens + receipt.trimmed_tokens
    assert receipt.drafted_tokens == parts
    assert receipt.verified_tokens >= receipt.accepted_tokens == sum(receipt.accepted_by_position)
    histogram = dict(receipt.draft_length_histogram)
    assert sum(histogram.values()) == receipt.rounds == sum(receipt.reasons.values())
    assert sum(k * n for k, n in histogram.items()) == receipt.verified_tokens
    assert histogram.get(0, 0) == receipt.undrafted_rounds


def settings_for(drafters: list[str], **overrides: Any) -> Settings:
    values: dict[str, Any] = {
        "model": {"target": "none", "name": MODEL},
        "verifiers": ({"id": "v0", "engine": "null", "integrity_check": True, "max_sequences": 4},),
        "drafters": tuple(
            {"id": f"d{i}", "kind": "null", "addr": address} for i, address in enumerate(drafters)
        ),
        # A port that nothing listens on.
        "policy": {"addr": "127.0.0.1:1"},
        "speculation": {"wait": "always"},
        **overrides,
    }
    return Settings(**values)


StartVerifier = Callable[..., Awaitable[Verifier]]


@pytest.fixture
async def start_verifier(tmp_path: Path) -> AsyncIterator[StartVerifier]:
    """Starts verifiers; waits until as many links are ready as ``ready`` says."""
    cleanups: list[Callable[[], Awaitable[None]]] = []

    async def start(drafters: list[str], *, ready: int | None = None, **overrides: Any) -> Verifier:
        context = ProcessContext(settings_for(drafters, **overrides), "v0", "verifier", tmp_path)
        files = ModelFiles(
            tmp_path, VOCAB, 40_000, frozenset({2}), None, tmp_path / "t", FINGERPRINT, None, {}
        )
        runner = GatedRunner()
        process = VerifierProcess(context, runner, files)
        process.link_settings.silence_s = 0.3
        process.worker = process.worker.__class__(
            process.describe, process.drain, process.set_testing, testing_allowed=True
        )
        server = GrpcServer()
        verifier_pb2_grpc.add_VerifierServicer_to_server(process.servicer, server.grpc)
        worker_pb2_grpc.add_WorkerServicer_to_server(process.worker, server.grpc)
        address = await server.start("127.0.0.1", 0, ["paceline.v1.Verifier", "paceline.v1.Worker"])
        tasks = process.start()
        channel = open_channel(address)

        async def stop() -> None:
            await channel.close()
            await server.stop(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            process.executor.shutdown()

        cleanups.append(stop)
        wanted = len(drafters) if ready is None else ready
        await until(lambda: sum(link.ready for link in process.drafting.links) >= wanted)
        return Verifier(
            process,
            runner,
            server,
            verifier_pb2_grpc.VerifierStub(channel),
            worker_pb2_grpc.WorkerStub(channel),
        )

    yield start
    for cleanup in reversed(cleanups):
        await cleanup()


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until the condition holds; the test's own time limit bounds it."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - conditions of several owners
            await asyncio.sleep(0)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """What the test modules need from here (importlib mode keeps them from importing it)."""
    kit = SimpleNamespace(request=request, chain=chain, collect=collect, until=until)
    kit.ScriptedDrafter, kit.check_receipt = ScriptedDrafter, check_receipt
    return kit


@pytest.fixture
async def start_drafter() -> AsyncIterator[Callable[..., Awaitable[ScriptedDrafter]]]:
    started: list[ScriptedDrafter] = []

    async def start(drafter: ScriptedDrafter, port: int = 0) -> ScriptedDrafter:
        await drafter.start(port)
        started.append(drafter)
        return drafter

    yield start
    for drafter in started:
        await drafter.server.stop(0)


@pytest.fixture
async def verifier(start_verifier: StartVerifier) -> Verifier:
    """Without drafters."""
    return await start_verifier([])
