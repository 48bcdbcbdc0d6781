"""The policy over loopback gRPC and HTTP: reports in, plans, table and explanations out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from paceline.core.errors import ConfigError
from paceline.policy.fleet import Fleet
from paceline.policy.main import serve
from paceline.policy.planner import Control
from paceline.policy.servicer import PolicyServicer
from paceline.v1 import policy_pb2, policy_pb2_grpc, worker_pb2
from paceline.wire.channels import open_channel
from paceline.wire.process import ProcessContext
from paceline.wire.server import GrpcServer
from paceline.wire.settings import Settings

SERVICE = "paceline.v1.Policy"
LOST, READY = worker_pb2.WORKER_STATE_LOST, worker_pb2.WORKER_STATE_READY
VERIFIER, DRAFTER = worker_pb2.WORKER_ROLE_VERIFIER, worker_pb2.WORKER_ROLE_DRAFTER


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Policy:
    """A policy on loopback whose replanning the test drives."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = Fleet(Control(), clock=self.clock)
        self.servicer = PolicyServicer(self.fleet, push_s=0.05)
        self.server = GrpcServer()
        policy_pb2_grpc.add_PolicyServicer_to_server(self.servicer, self.server.grpc)
        self.channels: list[grpc.aio.Channel] = []
        self.address = ""

    def stub(self) -> Any:
        channel = open_channel(self.address)
        self.channels.append(channel)
        return policy_pb2_grpc.PolicyStub(channel)


@pytest.fixture
async def policy() -> AsyncIterator[Policy]:
    running = Policy()
    running.address = await running.server.start("127.0.0.1", 0, [SERVICE])
    yield running
    running.servicer.stop()
    for channel in running.channels:
        await channel.close()
    await running.server.stop(1.0)


def step(i: int, base_s: float) -> policy_pb2.StepRecord:
    sequences, k = 1 + i % 4, i % 5
    tokens = sequences * (k + 1)
    return policy_pb2.StepRecord(
        sequences=sequences,
        query_tokens=tokens,
        query_context=tokens * 100,
        seconds=base_s + 0.0005 * tokens,
    )


def report(
    worker_id: str, number: int = 1, *, base_s: float = 0.02, accepted: int = 80, role: Any = VERIFIER
) -> policy_pb2.SyncRequest:
    message = policy_pb2.SyncRequest(
        worker_id=worker_id,
        role=role,
        state=READY,
        worker_incarnation=9,
        pid=77,
        report=number,
        running=1,
        sessions=2,
        blocks_used=3,
    )
    if role == VERIFIER:
        message.steps.extend(step(i, base_s) for i in range(100))
        message.drafts.append(
            policy_pb2.DraftStats(
                drafter_id="d0",
                rounds=100,
                verified_by_position=[100],
                accepted_by_position=[accepted],
                arrived_tokens=100,
                proposals=100,
                elapsed_s=0.2,
                hold_s=0.1,
                compute_s=0.1,
            )
        )
    return message


async def until(stream: Any, holds: Callable[[Any], bool]) -> Any:
    """The first message of a stream for which ``holds``."""
    async with asyncio.timeout(10):
        while True:
            message = await stream.read()
            assert message is not grpc.aio.EOF
            if holds(message):
                return message


def table(message: Any) -> dict[str, int]:
    return {worker.id: worker.state for worker in message.workers}


async def test_reports_bring_plans_and_a_routing_table(policy: Policy) -> None:
    stub = policy.stub()
    v0, v1, d0 = stub.Sync(), stub.Sync(), stub.Sync()
    watch = stub.Watch(policy_pb2.WatchRequest())
    try:
        await d0.write(report("d0", role=DRAFTER))
        await v0.write(report("v0", base_s=0.02))
        await v1.write(report("v1", base_s=0.06, accepted=2))
        first = await until(v0, lambda m: m.plans[0].reason == "best")
        second = await until(v1, lambda m: m.plans[0].reason == "not_paying")
        assert first.plans[0].drafter_id == "d0"
        assert first.plans[0].draft_tokens > 0
        assert first.plans[0].acceptance == pytest.approx(0.8)
        assert 0.0 < first.plans[0].max_wait_s <= 0.0206
        assert first.plans[0].round_trip_s == pytest.approx(0.001)
        assert second.plans[0].draft_tokens == 0
        seen = await until(watch, lambda m: set(table(m)) == {"v0", "v1", "d0"} and len(m.pairs) == 2)
        pairs = {(p.verifier_id, p.drafter_id): p for p in seen.pairs}
        assert pairs["v0", "d0"].weight > 3 * pairs["v1", "d0"].weight > 0
        assert pairs["v1", "d0"].predicted_tpot_ms == pytest.approx(60.5, rel=0.02)

        policy.clock.now_s += 1.0
        v0.cancel()
        lost = await until(watch, lambda m: table(m)["v0"] == LOST)
        assert table(lost) == {"v0": LOST, "v1": READY, "d0": READY}
        assert {p.verifier_id: p.weight for p in lost.pairs} == {"v0": 0.0, "v1": 1.0}
        policy.clock.now_s += 3.0
        policy.servicer.refresh()
        await until(watch, lambda m: set(table(m).values()) == {LOST})
    finally:
        for call in (v0, v1, d0, watch):
            call.cancel()


async def test_plans_come_again_without_a_change_and_half_closing_ends_the_stream(policy: Policy) -> None:
    call = policy.stub().Sync()
    try:
        await call.write(report("v0"))
        first = await until(call, lambda m: True)
        assert await until(call, lambda m: True) == first
        await call.done_writing()
        async with asyncio.timeout(10):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.OK
        assert policy.fleet.statuses()[0].state.value == "lost"
    finally:
        call.cancel()


async def test_explain_predict_and_fleet_answer(policy: Policy) -> None:
    stub = policy.stub()
    unknown = await stub.Predict(policy_pb2.PredictRequest(prompt_tokens=10, output_tokens=10))
    assert unknown == policy_pb2.PredictResponse(known=False)
    call = stub.Sync()
    try:
        await call.write(report("v0"))
        await until(call, lambda m: m.plans[0].reason == "best")
        known = await stub.Predict(policy_pb2.PredictRequest(prompt_tokens=10, output_tokens=11))
        assert known.known
        assert known.e2e_ms == pytest.approx(known.ttft_ms + 10 * known.tpot_ms)
        # One more request beside the one running: drafting, faster than the plain step of two.
        assert 0.0 < known.tpot_ms < 21.0
        why = await stub.Explain(policy_pb2.ExplainRequest(verifier_id="v0", drafter_id="d0"))
        assert [n.draft_tokens for n in why.neighbours] == list(range(9))
        best = min(why.neighbours, key=lambda n: n.tpot_ms)
        assert best.draft_tokens == why.plan.draft_tokens
        assert why.neighbours[0].tpot_ms == pytest.approx(20.5, rel=0.02)
        assert why.HasField("break_even_rps")
        fleet = await stub.Fleet(policy_pb2.FleetRequest())
        (worker,) = fleet.workers
        assert (worker.id, worker.state, worker.pid, worker.running) == ("v0", READY, 77, 1)
        assert (worker.sessions, worker.blocks_used) == (2, 3)
        assert worker.alpha == pytest.approx(0.8)
        assert worker.slowdown_observed == pytest.approx(1.0, abs=0.02)
        for ask in (
            stub.Explain(policy_pb2.ExplainRequest(verifier_id="v0", drafter_id="d9")),
            stub.Predict(policy_pb2.PredictRequest(verifier_id="v9")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        call.cancel()


async def test_garbage_is_counted_and_the_stream_lives_on(policy: Policy) -> None:
    stub = policy.stub()
    call = stub.Sync()
    try:
        await call.write(policy_pb2.SyncRequest())
        await call.write(report(""))
        broken = report("v0")
        broken.steps[0].seconds = float("nan")
        broken.steps[1].seconds = -1.0
        broken.drafts[0].accepted_by_position[0] = 101
        await call.write(broken)
        await call.write(report("v0", 1))
        await call.write(report("v1", 1))
        await call.write(report("v0", 2))
        await until(call, lambda m: m.plans[0].acceptance > 0.0 or bool(policy.servicer.refresh()))
        assert policy.fleet.ignored == {
            "malformed": 2,
            "step_seconds": 2,
            "draft_counts": 1,
            "out_of_order": 1,
            "foreign_worker": 1,
        }
    finally:
        call.cancel()


async def test_undecodable_bytes_end_only_their_own_stream(policy: Policy) -> None:
    good = policy.stub().Sync()
    async with open_channel(policy.address) as channel:
        raw = channel.stream_stream(f"/{SERVICE}/Sync")()
        try:
            await good.write(report("v0"))
            await raw.write(b"\xff\xff\xff")
            assert await raw.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until(good, lambda m: True)
            assert policy.fleet.statuses()[0].state.value == "ready"
        finally:
            raw.cancel()
            good.cancel()


async def test_the_process_serves_its_admin_port_and_drains_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings.model_validate({"policy": {"port": 0, "admin_port": 0}})
    context = ProcessContext(settings, "policy", "policy", tmp_path)
    process = asyncio.create_task(serve(context))
    state = tmp_path / "state.json"
    async with asyncio.timeout(10):
        while not state.exists():
            assert not process.done()
            await asyncio.sleep(0)
    ready = json.loads(state.read_text())
    assert json.loads(capsys.readouterr().out) == ready
    async with open_channel(ready["grpc"]) as channel, httpx.AsyncClient(base_url=ready["admin"]) as http:
        call: Any = policy_pb2_grpc.PolicyStub(channel).Sync()
        try:
            await call.write(report("v0"))
            await until(call, lambda m: m.plans[0].reason == "best")
            fleet = (await http.get("/fleet")).json()
            why = (await http.get("/explain", params={"verifier": "v0", "drafter": "d0"})).json()
            missing = await http.get("/explain", params={"verifier": "v9", "drafter": "d0"})
            metrics = (await http.get("/metrics")).text
            context.stopping.set()
            async with asyncio.timeout(5):
                await process
        finally:
            call.cancel()
    assert set(fleet) == {"workers", "pairs", "plan_age_s"}
    assert set(fleet["workers"][0]) == {
        "id",
        "role",
        "state",
        "pid",
        "running",
        "sessions",
        "blocks_used",
        "slowdown_observed",
        "alpha",
        "last_report_age_s",
    }
    assert (fleet["workers"][0]["role"], fleet["workers"][0]["state"]) == ("verifier", "ready")
    (pair,) = fleet["pairs"]
    assert set(pair) == {"verifier", "drafter", "weight", "k", "predicted_tpot_ms"}
    assert (pair["verifier"], pair["drafter"], pair["weight"]) == ("v0", "d0", 1.0)
    assert pair["k"] == why["plan"]["draft_tokens"] > 0
    assert why["neighbours"][0] == {"k": 0, "tpot_ms": pytest.approx(20.5, rel=0.02)}
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "verifier"
    assert 'paceline_policy_reports_total{worker="v0"} 1.0' in metrics
    assert "paceline_policy_plan_age_seconds" in metrics


async def test_a_control_to_come_refuses_to_start(tmp_path: Path) -> None:
    settings = Settings.model_validate({"control": {"kind": "adaspec"}})
    with pytest.raises(ConfigError, match=r"control\.kind"):
        await serve(ProcessContext(settings, "policy", "policy", tmp_path))
