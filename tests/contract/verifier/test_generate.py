"""The Verifier service without drafters: checks, streams, endings, fencing, failures."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from paceline.core.errors import ErrorKind, PacelineError
from paceline.v1 import common_pb2, policy_pb2, verifier_pb2, worker_pb2
from paceline.verifier.servicer import VerifierServicer
from paceline.wire.status import from_rpc_error


async def error_of(call: Any) -> PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


async def test_one_choice_from_start_to_finish(kit: Any, verifier: Any) -> None:
    answer = await verifier.ask(max_tokens=50)
    assert answer.tokens == kit.chain(50)
    assert answer.started.verifier_id == "v0"
    assert answer.started.worker_incarnation == verifier.process.incarnation
    finished = answer.finished
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert not finished.HasField("stop_token_id")
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (40, 50)
    receipt = finished.receipt
    kit.check_receipt(receipt)
    assert (receipt.exact, receipt.synthetic, receipt.seed, receipt.resumes) == (True, False, 7, 0)
    assert list(receipt.verifiers) == ["v0"]
    assert len(finished.rounds) == receipt.rounds == 50
    assert receipt.observed.e2e_ms >= receipt.observed.ttft_ms > 0
    assert receipt.predicted.tpot_ms == 0
    assert finished.terms.verify > 0
    verifier.check_idle()


async def test_offsets_join_without_gap(kit: Any, verifier: Any) -> None:
    length = 0
    async for response in verifier.stub.Generate(kit.request()):
        if response.HasField("tokens"):
            assert response.tokens.offset == length
            length += len(response.tokens.token_ids)
    assert length == 200


async def test_choices_and_seeds_differ_and_run_together(kit: Any, verifier: Any) -> None:
    cases = [(seed, choice) for seed in (1, 2) for choice in range(5)]
    answers = await asyncio.gather(
        *(verifier.ask(request_id=f"r{seed}", seed=seed, choice=choice) for seed, choice in cases)
    )
    for (seed, choice), answer in zip(cases, answers, strict=True):
        assert answer.tokens == kit.chain(200, seed=seed, choice=choice)
    verifier.check_idle()


async def test_a_stop_token_is_the_last_and_counted(kit: Any, verifier: Any) -> None:
    expected = kit.chain(50)
    stop = expected[20]
    answer = await verifier.ask(stop_token_ids=[stop], logprobs=1)
    assert answer.tokens == expected[: expected.index(stop) + 1]
    assert answer.finished.reason == common_pb2.FINISH_REASON_STOP
    assert answer.finished.stop_token_id == stop
    assert answer.finished.usage.completion_tokens == len(answer.tokens)
    later = await verifier.ask(stop_token_ids=[stop], min_tokens=21, max_tokens=30)
    assert len(later.tokens) > 20


async def test_logprobs_come_with_their_tokens(kit: Any, verifier: Any) -> None:
    count = 0
    async for response in verifier.stub.Generate(kit.request(logprobs=1, max_tokens=20)):
        assert len(response.tokens.logprobs) == len(response.tokens.token_ids)
        for token_id, logprob in zip(response.tokens.token_ids, response.tokens.logprobs, strict=True):
            assert logprob.top[0].token_id == token_id
            count += 1
    assert count == 20


async def test_a_resumed_choice_goes_on_where_it_was(kit: Any, verifier: Any) -> None:
    whole = kit.chain(60)
    answer = await verifier.ask(committed=whole[:25], max_tokens=60)
    assert answer.tokens == whole[25:]
    assert answer.offsets[0] == 25
    assert answer.finished.receipt.resumes == 1
    assert answer.finished.usage.completion_tokens == 60


async def test_the_prefix_cache_is_used(kit: Any, verifier: Any) -> None:
    assert (await verifier.ask()).started.cached_tokens == 0
    again = await verifier.ask()
    assert again.started.cached_tokens == again.finished.usage.cached_tokens == 32


@pytest.mark.parametrize(
    ("fields", "field", "kind"),
    [
        ({"model": "other"}, "model", ErrorKind.MODEL_NOT_FOUND),
        ({"prompt": [5000]}, "prompt_token_ids", ErrorKind.INVALID_ARGUMENT),
        ({"committed": [5000]}, "committed_token_ids", ErrorKind.INVALID_ARGUMENT),
        ({"committed": [1] * 200}, "committed_token_ids", ErrorKind.INVALID_ARGUMENT),
        ({"prompt": [1] * 40_000}, "prompt_token_ids", ErrorKind.CONTEXT_LENGTH_EXCEEDED),
        ({"request_id": ""}, "request_id", ErrorKind.INVALID_ARGUMENT),
        ({"temperature": -1.0}, "sampling.temperature", ErrorKind.INVALID_ARGUMENT),
        ({"max_tokens": 0}, "sampling.max_tokens", ErrorKind.INVALID_ARGUMENT),
        (
            {"speculation": common_pb2.SpeculationOptions(mode=common_pb2.SPECULATION_MODE_REJECTION)},
            "speculation.mode",
            ErrorKind.INVALID_ARGUMENT,
        ),
        (
            {"speculation": common_pb2.SpeculationOptions(drafter="nobody")},
            "speculation.drafter",
            ErrorKind.INVALID_ARGUMENT,
        ),
    ],
)
async def test_bad_requests_name_the_field(
    kit: Any, verifier: Any, fields: dict[str, Any], field: str, kind: ErrorKind
) -> None:
    error = await error_of(verifier.stub.Generate(kit.request(**fields)))
    assert (error.kind, error.field) == (kind, field)
    verifier.check_idle()


async def test_an_empty_prompt_is_refused(kit: Any, verifier: Any) -> None:
    request = kit.request()
    del request.prompt_token_ids[:]
    assert (await error_of(verifier.stub.Generate(request))).field == "prompt_token_ids"


async def test_a_client_that_leaves_frees_everything(kit: Any, verifier: Any) -> None:
    calls = [verifier.stub.Generate(kit.request(request_id=f"r{i}", max_tokens=30_000)) for i in range(6)]
    scheduler = verifier.process.scheduler
    await kit.until(lambda: (scheduler.running, scheduler.waiting) == (4, 2))
    assert scheduler.blocks.used > 0
    for call in calls:
        call.cancel()
    await asyncio.wait_for(verifier.process.steps.idle(), 20)
    verifier.check_idle()


async def test_leaving_during_a_step_waits_for_its_end(kit: Any, verifier: Any) -> None:
    call = verifier.stub.Generate(kit.request(max_tokens=30_000))
    await anext(aiter(call))
    verifier.runner.gate.clear()
    await kit.until(lambda: verifier.runner.waiting)
    call.cancel()
    await kit.until(lambda: not verifier.process.steps.choices)
    assert verifier.process.scheduler.running == 1, "the runner still reads its blocks"
    verifier.runner.gate.set()
    await asyncio.wait_for(verifier.process.steps.idle(), 20)
    verifier.check_idle()


async def test_abort_ends_the_stream_with_a_receipt(kit: Any, verifier: Any) -> None:
    call = verifier.stub.Generate(kit.request(max_tokens=30_000))
    await anext(aiter(call))
    response = await verifier.stub.Abort(verifier_pb2.AbortRequest(request_id="r"))
    assert response.aborted == 1
    answer = await kit.collect(call)
    assert answer.tokens == kit.chain(len(answer.tokens))
    assert answer.finished.reason == common_pb2.FINISH_REASON_CANCELLED
    kit.check_receipt(answer.finished.receipt)
    await asyncio.wait_for(verifier.process.steps.idle(), 20)
    verifier.check_idle()
    assert (await verifier.stub.Abort(verifier_pb2.AbortRequest(request_id="r"))).aborted == 0


async def test_abort_of_one_choice_leaves_the_others(kit: Any, verifier: Any) -> None:
    calls = [verifier.stub.Generate(kit.request(choice=i, max_tokens=3000)) for i in range(2)]
    await asyncio.gather(*(anext(aiter(call)) for call in calls))
    abort = verifier_pb2.AbortRequest(request_id="r", choice_index=1)
    assert (await verifier.stub.Abort(abort)).aborted == 1
    answers = await asyncio.gather(*(kit.collect(call) for call in calls))
    reasons = [answer.finished.reason for answer in answers]
    assert reasons == [common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_CANCELLED]
    verifier.check_idle()


async def test_grants_are_fenced(kit: Any, verifier: Any) -> None:
    old = verifier.stub.Generate(kit.request(epoch=5, max_tokens=30_000))
    await anext(aiter(old))
    stale = await error_of(verifier.stub.Generate(kit.request(epoch=4)))
    assert (stale.kind, stale.field) == (ErrorKind.FAILED_PRECONDITION, "grant_epoch")
    twice = await error_of(verifier.stub.Generate(kit.request(epoch=5)))
    assert twice.kind is ErrorKind.ALREADY_EXISTS
    answer = await verifier.ask(epoch=6)
    assert answer.tokens == kit.chain(200)
    assert (await error_of(old)).kind is ErrorKind.CANCELLED
    late = await error_of(verifier.stub.Generate(kit.request(epoch=5)))
    assert late.kind is ErrorKind.FAILED_PRECONDITION
    verifier.check_idle()


async def test_more_than_four_times_the_sequences_are_refused(kit: Any, verifier: Any) -> None:
    verifier.runner.gate.clear()
    calls = [verifier.stub.Generate(kit.request(request_id=f"r{i}")) for i in range(16)]
    await kit.until(lambda: len(verifier.process.steps.choices) == 16)
    error = await error_of(verifier.stub.Generate(kit.request(request_id="one too many")))
    assert error.kind is ErrorKind.OVERLOADED
    assert "16" in error.message
    verifier.runner.gate.set()
    answers = await asyncio.gather(*(kit.collect(call) for call in calls))
    assert all(answer.tokens == kit.chain(200) for answer in answers)
    verifier.check_idle()


async def test_not_finite_logits_fail_one_request_only(kit: Any, verifier: Any) -> None:
    await verifier.worker.SetTesting(worker_pb2.SetTestingRequest(nan_request="bad"))
    bad = verifier.stub.Generate(kit.request(request_id="bad"))
    good, error = await asyncio.gather(verifier.ask(request_id="good"), error_of(bad))
    assert error.kind is ErrorKind.INTERNAL
    assert "finite" in error.message
    assert good.tokens == kit.chain(200)
    assert (await verifier.ask(request_id="bad")).tokens == kit.chain(200)
    verifier.check_idle()


async def test_a_broken_engine_tells_everyone(kit: Any, verifier: Any) -> None:
    call = verifier.stub.Generate(kit.request(max_tokens=30_000))
    await anext(aiter(call))
    verifier.runner.explode = True
    assert (await error_of(call)).kind is ErrorKind.UNAVAILABLE
    assert verifier.process.broken.is_set()
    after = await error_of(verifier.stub.Generate(kit.request(request_id="later")))
    assert after.kind is ErrorKind.UNAVAILABLE
    described = await verifier.worker.Describe(worker_pb2.DescribeRequest(protocol=1))
    assert described.state == worker_pb2.WORKER_STATE_LOST
    verifier.check_idle()


async def test_drain_refuses_new_and_finishes_old(kit: Any, verifier: Any) -> None:
    call = verifier.stub.Generate(kit.request())
    await anext(aiter(call))
    drained = asyncio.ensure_future(verifier.worker.Drain(worker_pb2.DrainRequest(grace_s=20)))
    await kit.until(lambda: not verifier.process.servicer.accepting)
    refused = await error_of(verifier.stub.Generate(kit.request(request_id="new")))
    assert refused.kind is ErrorKind.UNAVAILABLE
    assert len((await kit.collect(call)).tokens) >= 199
    assert (await drained).unfinished == 0


async def test_drain_reports_what_is_left(kit: Any, verifier: Any) -> None:
    call = verifier.stub.Generate(kit.request(max_tokens=30_000))
    await anext(aiter(call))
    verifier.runner.gate.clear()
    assert (await verifier.worker.Drain(worker_pb2.DrainRequest(grace_s=0))).unfinished == 1
    verifier.runner.gate.set()
    call.cancel()


class StuckContext:
    """A stream whose reader takes nothing after the first message."""

    def __init__(self) -> None:
        self.written = 0

    async def write(self, _: Any) -> None:
        self.written += 1
        if self.written > 1:
            await asyncio.Event().wait()


async def test_a_reader_that_takes_nothing_is_cut_and_disturbs_no_one(kit: Any, start_verifier: Any) -> None:
    verifier = await start_verifier([], gateway={"stall_timeout_s": 0.05})
    servicer: VerifierServicer = verifier.process.servicer
    stuck = servicer.Generate(kit.request(request_id="stuck", max_tokens=30_000), StuckContext())
    reading = asyncio.ensure_future(anext(stuck))
    await kit.until(lambda: len(verifier.process.steps.choices) == 1)
    answer = await verifier.ask(request_id="other")
    assert answer.tokens == kit.chain(200)
    with pytest.raises(PacelineError, match="stall_timeout_s"):
        await reading
    await asyncio.wait_for(verifier.process.steps.idle(), 20)
    verifier.check_idle()


async def test_describe_and_report(kit: Any, verifier: Any) -> None:
    described = await verifier.worker.Describe(worker_pb2.DescribeRequest(protocol=1))
    assert (described.id, described.role) == ("v0", worker_pb2.WORKER_ROLE_VERIFIER)
    assert (described.vocab_size, described.max_context_tokens) == (5000, 40_000)
    assert described.exact
    await verifier.ask(max_tokens=10)
    report: policy_pb2.SyncRequest = verifier.process.policy.next_report()
    assert sum(step.query_tokens for step in report.steps) == 40 + 9
    assert sum(step.prefill_tokens for step in report.steps) == 39
    assert [(r.prompt_tokens, r.output_tokens) for r in report.requests] == [(40, 10)]
    assert report.blocks_used == 0
    assert not verifier.process.policy.next_report().steps
