"""The verifier process from ready line to drain, and its link to the policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import PacelineError
from paceline.engine.null import NullRunner, TimedRunner
from paceline.v1 import policy_pb2, policy_pb2_grpc, verifier_pb2_grpc
from paceline.verifier import main
from paceline.wire.channels import open_channel
from paceline.wire.models import ModelFiles
from paceline.wire.process import ProcessContext, StartupError
from paceline.wire.server import GrpcServer
from paceline.wire.settings import Settings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def settings_of(engine: str = "null", **values: Any) -> Settings:
    entry = {"id": "v0", "engine": engine, "port": 0, "admin_port": 0, "slowdown": 1.5}
    common: dict[str, Any] = {
        "model": {"target": "none", "name": "test-model"},
        "verifiers": (entry,),
        "drafters": (),
        "policy": {"addr": "127.0.0.1:1"},
    }
    return Settings(**{**common, **values})


def files_in(path: Path) -> ModelFiles:
    return ModelFiles(path, 5000, 4096, frozenset({2}), None, path / "t", "f" * 64, None, {})


class Serving:
    """`serve` as a task, with its ready event."""

    def __init__(self, context: ProcessContext, event: dict[str, Any], task: asyncio.Task[None]) -> None:
        self.context, self.event, self.task = context, event, task


@pytest.fixture
async def serving(tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    monkeypatch.setattr(main, "locate", lambda _: files_in(tmp_path))
    context = ProcessContext(settings_of(), "v0", "verifier", tmp_path)
    task = asyncio.ensure_future(main.serve(context))
    await kit.until(lambda: (tmp_path / "state.json").exists() or task.done())
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    yield Serving(context, event, task)
    context.stopping.set()
    if not task.done():
        await task


async def health_of(channel: Any, service: str) -> int:
    check = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(check)).status)


async def test_ready_serves_and_drains(kit: Any, serving: Serving) -> None:
    assert serving.event["event"] == "ready"
    assert [p["role"] for p in serving.event["processes"]] == ["verifier"]
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{serving.event['admin']}/metrics")).text
    assert 'paceline_kv_blocks{state="free"}' in text
    assert "paceline_step_seconds" in text
    async with open_channel(serving.event["grpc"]) as channel:
        assert await health_of(channel, "paceline.v1.Verifier") == SERVING
        call = verifier_pb2_grpc.VerifierStub(channel).Generate(kit.request(max_tokens=2000))
        stream = aiter(call)
        await anext(stream)
        serving.context.stopping.set()
        answer = await kit.collect(call)
        assert answer.finished.usage.completion_tokens == 2000, "what runs is finished"
    await serving.task


async def test_a_broken_engine_ends_the_process_to_be_started_again(
    kit: Any, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(NullRunner, "execute", explode)
    async with open_channel(serving.event["grpc"]) as channel:
        call = verifier_pb2_grpc.VerifierStub(channel).Generate(kit.request())
        with pytest.raises(Exception, match="engine failed"):
            await kit.collect(call)
    with pytest.raises(PacelineError, match="the engine failed"):
        await serving.task


def test_engines_are_built_from_the_settings(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    settings = settings_of("timed", testing={"timed": {"verify_ms": 1.0}})
    timed = main.build_runner(settings, settings.verifier("v0"), files)
    assert isinstance(timed, TimedRunner)
    assert (timed.slowdown, timed.vocab_size, timed.num_blocks) == (1.5, 5000, 64 * 4096 // 16)
    vllm = settings_of("vllm")
    with pytest.raises(StartupError, match="engine vllm is not available in this build"):
        main.build_runner(vllm, vllm.verifier("v0"), files)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (True, None, 8)),
        ({"speculation": {"enabled": False}}, (False, None, 8)),
        ({"speculation": {"k": 3, "k_max": 5}}, (True, 3, 5)),
        ({"control": {"kind": "off"}}, (False, None, 8)),
        ({"control": {"kind": "fixed", "arg": 2.0}}, (True, 2, 8)),
    ],
)
def test_draft_rules_of_the_settings(values: dict[str, Any], expected: tuple[Any, ...]) -> None:
    rule = main.draft_rule(settings_of(**values))
    assert (rule.enabled, rule.fixed_tokens, rule.k_max) == expected


class ScriptedPolicy(policy_pb2_grpc.PolicyServicer):
    """Answers the first report of each stream with the plan."""

    def __init__(self, plan: policy_pb2.DraftPlan) -> None:
        self.plan = plan
        self.reports: list[policy_pb2.SyncRequest] = []

    async def Sync(self, requests: Any, context: Any) -> AsyncIterator[policy_pb2.SyncResponse]:
        async for request in requests:
            self.reports.append(request)
            yield policy_pb2.SyncResponse(plans=[self.plan])


async def test_plans_rule_and_outlive_the_policy(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    plan = policy_pb2.DraftPlan(
        drafter_id="d0", draft_tokens=2, reason="best", step_base_s=0.01, acceptance=1.0, max_wait_s=0.01
    )
    policy, server = ScriptedPolicy(plan), GrpcServer()
    policy_pb2_grpc.add_PolicyServicer_to_server(policy, server.grpc)
    address = await server.start("127.0.0.1", 0, ["paceline.v1.Policy"])
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address], policy={"addr": address})
    link = verifier.process.policy
    await kit.until(lambda: link.plan("d0") is not None)
    answer = await verifier.ask()
    assert answer.tokens == kit.chain(200)
    receipt = answer.finished.receipt
    assert receipt.reasons["best"] > 50
    assert receipt.draft_length_histogram[2] > 50
    # (10 ms step + 0 draft) / 3 tokens.
    assert receipt.predicted.tpot_ms == pytest.approx(10 / 3)
    await server.stop(0)
    again = await verifier.ask()
    assert again.finished.receipt.reasons["best"] > 50
    first = policy.reports[0]
    assert (first.worker_id, first.report, first.blocks_total) == ("v0", 1, 8192)
