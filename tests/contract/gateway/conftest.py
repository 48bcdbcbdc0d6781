"""A gateway in this process with real HTTP, gRPC and queue, and verifiers that the test drives."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.core.noise import Domain, noise_key
from paceline.core.nullmodel import null_token
from paceline.gateway.main import serve
from paceline.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.wire.models import read_model
from paceline.wire.process import ProcessContext
from paceline.wire.server import GrpcServer
from paceline.wire.settings import Settings
from paceline.wire.worker import PROTOCOL_VERSION, WorkerServicer

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT_TOKENS = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a chat template; the model itself is never needed."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return folder


@dataclass
class Call:
    """One Generate call as the verifier saw it."""

    request: verifier_pb2.VerifierGenerateRequest
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False


class FakeVerifier(verifier_pb2_grpc.VerifierServicer):
    """Emits the documented null tokens, a few at a time, as far as the test lets it.

    Args:
        script: fixed output in place of null tokens.
    """

    def __init__(self, worker_id: str, files: Any, model: str) -> None:
        self.id = worker_id
        self.files = files
        self.model = model
        self.calls: list[Call] = []
        self.called = asyncio.Condition()
        self.script: Sequence[int] | None = None
        self.round_tokens = 3
        self.hold_after: int | None = None
        """Output length at which calls wait for `released`."""
        self.released = asyncio.Event()
        self.held = asyncio.Event()
        self.overlap_tokens = 0
        """Tokens sent again at the start of a resumed call."""
        self.error: grpc.StatusCode | None = None
        self.aborted: set[tuple[str, int]] = set()
        self.max_sequences = 8
        self.fingerprint = files.tokenizer_fingerprint
        self.state: worker_pb2.WorkerState = worker_pb2.WORKER_STATE_READY
        self.testing: list[worker_pb2.SetTestingRequest] = []
        self.server = GrpcServer()
        self.address = ""
        verifier_pb2_grpc.add_VerifierServicer_to_server(self, self.server.grpc)
        worker = WorkerServicer(self.describe, self.drain, self.testing.append, testing_allowed=True)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, self.server.grpc)

    async def start(self, port: int = 0) -> None:
        self.address = await self.server.start("127.0.0.1", port, ["paceline.v1.Verifier"])

    async def kill(self) -> None:
        """Cuts every connection at once."""
        await self.server.stop(0)

    def describe(self) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            protocol=PROTOCOL_VERSION,
            id=self.id,
            role=worker_pb2.WORKER_ROLE_VERIFIER,
            state=self.state,
            worker_incarnation=7,
            pid=os.getpid(),
            model=self.model,
            tokenizer_fingerprint=self.fingerprint,
            vocab_size=self.files.vocab_size,
            max_context_tokens=CONTEXT_TOKENS,
            exact=True,
            max_sequences=self.max_sequences,
            kv_cache_tokens=65_536,
        )

    async def drain(self, grace_s: float) -> int:
        self.state = worker_pb2.WORKER_STATE_DRAINING
        return 0

    def output(self, request: verifier_pb2.VerifierGenerateRequest) -> list[int]:
        """All tokens of the choice, from the first."""
        if self.script is not None:
            return list(self.script)[: request.sampling.max_tokens]
        return null_output(
            self.files.vocab_size,
            request.prompt_token_ids,
            request.sampling.seed,
            request.choice_index,
            request.sampling.max_tokens,
        )

    def is_aborted(self, request: verifier_pb2.VerifierGenerateRequest) -> bool:
        return (request.request_id, request.choice_index) in self.aborted

    async def Abort(self, request: verifier_pb2.AbortRequest, context: Any) -> verifier_pb2.AbortResponse:
        self.aborted.add((request.request_id, request.choice_index))
        self.released.set()
        return verifier_pb2.AbortResponse(aborted=1)

    async def Generate(
        self, request: verifier_pb2.VerifierGenerateRequest, context: Any
    ) -> AsyncIterator[verifier_pb2.VerifierGenerateResponse]:
        call = Call(request)
        self.calls.append(call)
        async with self.called:
            self.called.notify_all()
        try:
            if self.error is not None:
                await context.abort(self.error, "made by the test")
            started = verifier_pb2.GenerateStarted(verifier_id=self.id, worker_incarnation=7, cached_tokens=2)
            yield verifier_pb2.VerifierGenerateResponse(started=started)
            tokens = self.output(request)
            at = max(0, len(request.committed_token_ids) - self.overlap_tokens)
            rounds = 0
            while at < len(tokens) and not self.is_aborted(request):
                if self.hold_after is not None and at >= self.hold_after:
                    self.held.set()
                    await self.released.wait()
                    if self.is_aborted(request):
                        break
                piece = tokens[at : at + self.round_tokens]
                committed = verifier_pb2.CommittedTokens(offset=at, token_ids=piece)
                if request.sampling.HasField("logprobs"):
                    top = [common_pb2.TopLogprob(token_id=t, logprob=-0.5) for t in (1, 2)]
                    committed.logprobs.extend(
                        common_pb2.TokenLogprobs(logprob=-0.5, top=top[: request.sampling.logprobs])
                        for _ in piece
                    )
                at += len(piece)
                rounds += 1
                yield verifier_pb2.VerifierGenerateResponse(tokens=committed)
            if self.hold_after == len(tokens):
                self.held.set()
                await self.released.wait()
            yield verifier_pb2.VerifierGenerateResponse(finished=self._finished(request, tokens, rounds))
        except asyncio.CancelledError:
            call.cancelled = True
            raise
        finally:
            call.ended.set()

    def _finished(
        self, request: verifier_pb2.VerifierGenerateRequest, tokens: Sequence[int], rounds: int
    ) -> verifier_pb2.GenerateFinished:
        reason = common_pb2.FINISH_REASON_LENGTH
        if self.is_aborted(request):
            reason = common_pb2.FINISH_REASON_CANCELLED
        elif tokens and tokens[-1] in self.files.eos_token_ids:
            reason = common_pb2.FINISH_REASON_STOP
        receipt = common_pb2.Receipt(
            request_id=request.request_id,
            seed=request.sampling.seed,
            exact=True,
            verifiers=[self.id],
            rounds=rounds,
            drafted_tokens=rounds * 2,
            verified_tokens=rounds * 2,
            accepted_tokens=rounds * 2,
        )
        records = [
            common_pb2.RoundRecord(k=2, asked=2, arrived=2, accepted=2, reason="best") for _ in range(rounds)
        ]
        terms = common_pb2.TermSeconds(prefill=0.25, verify=0.5)
        return verifier_pb2.GenerateFinished(reason=reason, receipt=receipt, rounds=records, terms=terms)


def null_output(vocab_size: int, prompt: Sequence[int], seed: int, choice: int, max_tokens: int) -> list[int]:
    key = noise_key(seed, choice, list(prompt), Domain.TARGET)
    tokens: list[int] = []
    for position in range(max_tokens):
        previous = tokens[-1] if tokens else prompt[-1]
        tokens.append(null_token(key, position, previous, vocab_size))
    return tokens


class Context(ProcessContext):
    """Keeps the ready line instead of printing it."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        super().__init__(settings, "gateway", "gateway", run_dir)
        self.addresses: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    def ready(self, *, http: str = "", grpc: str = "", admin: str = "", redis: str = "") -> None:
        self.addresses.set_result({"http": http, "grpc": grpc, "admin": admin, "redis": redis})


@dataclass
class Running:
    """A gateway that is ready, with clients of its ports."""

    context: Context
    task: asyncio.Task[None]
    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    grpc: grpc.aio.Channel
    addresses: dict[str, str]
    verifiers: list[FakeVerifier]

    async def post(self, path: str, **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        return await self.http.post(path, json={"model": "tiny", **body}, headers=headers)

    async def chat(self, content: str = "hello", **fields: Any) -> dict[str, Any]:
        fields.setdefault("messages", [{"role": "user", "content": content}])
        response = await self.post("/v1/chat/completions", **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, path: str, **body: Any) -> AsyncIterator[dict[str, Any] | str]:
        """Chunks up to the end; ``[DONE]`` as that string."""
        body = {"model": "tiny", "stream": True, **body}
        async with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts verifiers and a gateway over them; everything is stopped after the test."""
    async with AsyncExitStack() as stack:

        async def begin(
            verifiers: int = 1, *, prepare: Callable[[FakeVerifier], None] = lambda _: None, **gateway: Any
        ) -> Running:
            files = read_model(tiny_model, "tiny")
            fakes = [FakeVerifier(f"v{i}", files, "tiny") for i in range(verifiers)]
            for fake in fakes:
                prepare(fake)
                await fake.start()
                stack.push_async_callback(fake.kill)
            settings = Settings.model_validate(
                {
                    "model": {"target": str(tiny_model), "name": "tiny"},
                    "verifiers": tuple({"id": f.id, "addr": f.address} for f in fakes),
                    "drafters": (),
                    "policy": {"addr": gateway.pop("policy", "127.0.0.1:1")},
                    "queue": gateway.pop("queue", {}),
                    "classes": ({"name": "default"}, {"name": "batch", "priority": 5}),
                    "gateway": {"port": 0, "grace_s": 5.0, **gateway},
                }
            )
            context = Context(settings, tmp_path)
            task = asyncio.create_task(serve(context))
            await asyncio.wait({task, context.addresses}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            addresses = await context.addresses

            async def stop() -> None:
                context.stopping.set()
                context.aborting.set()
                await task

            stack.push_async_callback(stop)
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=addresses["http"], timeout=30, trust_env=False)
            )
            admin = await stack.enter_async_context(
                httpx.AsyncClient(base_url=addresses["admin"], timeout=30, trust_env=False)
            )
            channel = grpc.aio.insecure_channel(addresses["grpc"])
            stack.push_async_callback(channel.close)
            return Running(context, task, http, admin, channel, addresses, fakes)

        yield begin
