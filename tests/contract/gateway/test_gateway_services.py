"""The gateway beside the services it can do without: the policy and the queue's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from paceline.gateway.queue import EmbeddedRedis
from paceline.v1 import policy_pb2, policy_pb2_grpc, worker_pb2
from paceline.wire.server import GrpcServer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


class FakePolicy(policy_pb2_grpc.PolicyServicer):
    """One table: everything to v1."""

    def __init__(self) -> None:
        self.server = GrpcServer()
        self.watched = asyncio.Event()
        policy_pb2_grpc.add_PolicyServicer_to_server(self, self.server.grpc)

    @property
    def workers(self) -> list[policy_pb2.WorkerStatus]:
        role, ready = worker_pb2.WORKER_ROLE_VERIFIER, worker_pb2.WORKER_STATE_READY
        return [
            policy_pb2.WorkerStatus(
                id="v1",
                role=role,
                state=ready,
                pid=11,
                running=2,
                blocks_used=5,
                slowdown_observed=1.5,
                alpha=0.5,
            ),
            policy_pb2.WorkerStatus(id="d7", role=worker_pb2.WORKER_ROLE_DRAFTER, state=ready, sessions=3),
        ]

    @property
    def pairs(self) -> list[policy_pb2.Pair]:
        pair = policy_pb2.Pair(
            verifier_id="v1", drafter_id="d7", weight=1, draft_tokens=4, predicted_tpot_ms=7
        )
        return [policy_pb2.Pair(verifier_id="v0", drafter_id="d7", weight=0), pair]

    async def Watch(
        self, request: policy_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.WatchResponse]:
        yield policy_pb2.WatchResponse(pairs=self.pairs, workers=self.workers, plan_age_s=1)
        self.watched.set()
        await asyncio.Event().wait()

    async def Fleet(self, request: policy_pb2.FleetRequest, context: Any) -> policy_pb2.FleetResponse:
        return policy_pb2.FleetResponse(pairs=self.pairs, workers=self.workers, plan_age_s=1)

    async def Predict(self, request: policy_pb2.PredictRequest, context: Any) -> policy_pb2.PredictResponse:
        return policy_pb2.PredictResponse(known=True, ttft_ms=3, tpot_ms=2, e2e_ms=request.output_tokens)

    async def Explain(self, request: policy_pb2.ExplainRequest, context: Any) -> policy_pb2.ExplainResponse:
        neighbour = policy_pb2.Neighbour(draft_tokens=3, tpot_ms=8)
        return policy_pb2.ExplainResponse(neighbours=[neighbour], break_even_rps=2.5)


async def test_the_policys_table_is_followed_and_kept(start: Any) -> None:
    policy = FakePolicy()
    address = await policy.server.start("127.0.0.1", 0, ["paceline.v1.Policy"])
    gateway = await start(verifiers=2, policy=address, prepare=lambda v: setattr(v, "hold_after", 3))
    await policy.watched.wait()
    while len((await gateway.admin.get("/fleet")).json()["pairs"]) != 2:
        pass
    requests = [
        asyncio.create_task(gateway.chat(max_tokens=9, ignore_eos=True, speculation={"receipt": True}))
        for _ in range(3)
    ]
    second = gateway.verifiers[1]
    async with second.called:
        await second.called.wait_for(lambda: len(second.calls) == 3)
    second.released.set()
    for request in requests:
        receipt = (await request)["speculation"]
        assert receipt["verifiers"] == ["v1"]
        assert receipt["predicted"] == {"ttft_ms": 3.0, "tpot_ms": 2.0, "e2e_ms": 9.0}
    view = (await gateway.admin.get("/requests/last")).json()
    assert (view["neighbours"], view["break_even_rps"]) == ([{"k": 3, "tpot_ms": 8.0}], 2.5)
    fleet = (await gateway.admin.get("/fleet")).json()
    workers = {worker["id"]: worker for worker in fleet["workers"]}
    assert set(workers) == {"v0", "v1", "d7"}
    assert (workers["v1"]["running"], workers["v1"]["alpha"], workers["d7"]["sessions"]) == (2, 0.5, 3)
    pair = {"verifier": "v1", "drafter": "d7", "weight": 1.0, "k": 4, "predicted_tpot_ms": 7.0}
    assert fleet["pairs"][1] == pair

    await policy.server.stop(0)
    kept = (await gateway.admin.get("/fleet")).json()
    assert kept["pairs"][1] == pair
    assert kept["plan_age_s"] >= 1
    assert (await gateway.chat(max_tokens=3, speculation={"receipt": True}))["speculation"]["verifiers"] == [
        "v1"
    ]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    folder = tmp_path / "server"
    folder.mkdir()
    embedded = EmbeddedRedis(folder)
    async with embedded:
        yield embedded


def one_at_a_time(verifier: Any) -> None:
    verifier.max_sequences, verifier.hold_after = 1, 0


async def test_an_emptied_queue_heals(start: Any, server: EmbeddedRedis) -> None:
    gateway = await start(prepare=one_at_a_time, queue={"url": server.url, "lease_s": 1.0})
    verifier = gateway.verifiers[0]
    first = asyncio.create_task(gateway.chat(max_tokens=6, ignore_eos=True))
    await verifier.held.wait()
    second = asyncio.create_task(gateway.chat(max_tokens=6, ignore_eos=True))
    while 'vllm:num_requests_waiting{model_name="tiny"} 1.0' not in (await gateway.http.get("/metrics")).text:
        pass
    async with redis.asyncio.Redis.from_url(server.url) as client:
        await client.flushall()
    verifier.released.set()
    for request in (first, second):
        assert (await request)["usage"]["completion_tokens"] == 6


async def test_a_dead_queue_refuses_new_work_and_finishes_old(start: Any, server: EmbeddedRedis) -> None:
    gateway = await start(prepare=lambda v: setattr(v, "hold_after", 3), queue={"url": server.url})
    verifier = gateway.verifiers[0]
    running = asyncio.create_task(gateway.chat(max_tokens=9, ignore_eos=True))
    await verifier.held.wait()
    await server.stop()
    refused = await gateway.post(CHAT, messages=MESSAGES, max_tokens=4)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    verifier.released.set()
    assert (await running)["usage"]["completion_tokens"] == 9
    await server.start()
    while (await gateway.post(CHAT, messages=MESSAGES, max_tokens=4)).status_code != 200:
        pass
