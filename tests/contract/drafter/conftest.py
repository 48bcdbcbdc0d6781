"""The Drafter service over loopback gRPC, with the null kind (its tokens are known beforehand)."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest

from paceline.core.nullmodel import null_token
from paceline.core.tokens import prefix_hash
from paceline.drafter.null import NullKind
from paceline.drafter.rounds import Drafting
from paceline.drafter.servicer import DrafterServicer
from paceline.drafter.sessions import SessionTable
from paceline.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc
from paceline.wire.channels import open_channel
from paceline.wire.server import GrpcServer

VOCAB, KEY = 5000, 0xFEED_0123_4567_89AB


class Clock:
    """Time that tests move; starts anywhere."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Service:
    stub: drafter_pb2_grpc.DrafterStub
    channel: grpc.aio.Channel
    servicer: DrafterServicer
    drafting: Drafting
    table: SessionTable
    clock: Clock
    opener: grpc.aio.StreamStreamCall
    """A Sessions stream that stays, and with it what it opened."""

    @staticmethod
    def sampling(prompt_tokens: int, **fields: object) -> drafter_pb2.DraftSampling:
        return drafter_pb2.DraftSampling(
            params=common_pb2.SamplingParams(), noise_key=KEY, prompt_tokens=prompt_tokens, **fields
        )

    @staticmethod
    def chunks(
        session_id: int, tokens: list[int], *, generation: int = 1, size: int = 16_384, **fields: object
    ) -> list[drafter_pb2.SessionsRequest]:
        out = []
        for offset in range(0, len(tokens), size):
            message = drafter_pb2.OpenSession(
                session_id=session_id,
                session_gen=generation,
                offset=offset,
                total_tokens=len(tokens),
                token_ids=tokens[offset : offset + size],
            )
            if offset == 0:
                message.sampling.CopyFrom(Service.sampling(len(tokens), **fields))
            out.append(drafter_pb2.SessionsRequest(open=message))
        return out

    async def sessions(
        self, requests: list[drafter_pb2.SessionsRequest]
    ) -> list[drafter_pb2.SessionsResponse]:
        call = self.stub.Sessions(iter(requests))
        try:
            return [response async for response in call]
        finally:
            call.cancel()

    async def opened(self, session_id: int, tokens: list[int], generation: int = 1) -> None:
        for request in self.chunks(session_id, tokens, generation=generation):
            await self.opener.write(request)
        response = await self.opener.read()
        assert response.opened == drafter_pb2.SessionOpened(
            session_id=session_id, session_gen=generation, length=len(tokens)
        )

    @staticmethod
    def commit(
        session_id: int,
        before: list[int],
        new: list[int],
        *,
        ask: int = 4,
        generation: int = 1,
        need_by_us: int = 0,
    ) -> drafter_pb2.SessionCommit:
        return drafter_pb2.SessionCommit(
            session_id=session_id,
            session_gen=generation,
            base_length=len(before),
            prefix_hash=prefix_hash(before),
            token_ids=new,
            ask_tokens=ask,
            need_by_us=need_by_us,
        )

    async def rounds(self, *frames: list[drafter_pb2.SessionCommit]) -> list[drafter_pb2.RoundsResponse]:
        """One response awaited after each frame, on a stream of its own."""
        call = self.stub.Rounds()
        out = []
        try:
            for number, commits in enumerate(frames, 1):
                await call.write(drafter_pb2.RoundsRequest(frame=number, commits=commits))
                out.append(await call.read())
        finally:
            call.cancel()
        return out

    @staticmethod
    def null_chain(tokens: list[int], prompt_tokens: int, k: int) -> list[int]:
        text = list(tokens)
        for _ in range(k):
            text.append(null_token(KEY, len(text) - prompt_tokens, text[-1], VOCAB))
        return text[len(tokens) :]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    kind, clock = NullKind(VOCAB), Clock()
    table = SessionTable(kind, max_sessions=128)
    drafting = Drafting(kind, table, clock=clock)
    servicer = DrafterServicer(table, drafting, clock)
    server = GrpcServer()
    drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server.grpc)
    address = await server.start("127.0.0.1", 0, ["paceline.v1.Drafter"])
    task = asyncio.create_task(drafting.run())
    async with open_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterStub(channel)
        opener = stub.Sessions()
        yield Service(stub, channel, servicer, drafting, table, clock, opener)
        opener.cancel()
    await server.stop(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
