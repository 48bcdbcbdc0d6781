"""Rounds over loopback gRPC: commits, asks, proposals, and what becomes of broken streams."""

import asyncio
from typing import Any

import grpc
import pytest

from paceline.core.tokens import prefix_hash
from paceline.v1 import drafter_pb2

OK = drafter_pb2.PROPOSAL_STATUS_OK
UNKNOWN = drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION
MISMATCH = drafter_pb2.PROPOSAL_STATUS_PREFIX_MISMATCH
VOCAB = 5000


async def test_open_commit_ask_propose(service: Any) -> None:
    prompt = [7, 8, 9]
    await service.opened(1, prompt)
    first, second = await service.rounds(
        [service.commit(1, prompt, [])], [service.commit(1, prompt, [2001, 2002], ask=3)]
    )
    assert first.frame == 1
    assert list(first.proposals[0].token_ids) == service.null_chain(prompt, 3, 4)
    assert first.proposals[0].base_length == 3
    assert first.proposals[0].prefix_hash == prefix_hash(prompt)
    proposal = second.proposals[0]
    text = [*prompt, 2001, 2002]
    assert (second.frame, proposal.status, proposal.base_length) == (2, OK, 5)
    assert proposal.prefix_hash == prefix_hash(text)
    assert list(proposal.token_ids) == service.null_chain(text, 3, 3)
    assert proposal.confidence == b"\xff\xff\xff"
    assert proposal.ask_tokens == 3


async def test_an_ask_of_none_is_acknowledged(service: Any) -> None:
    await service.opened(1, [5])
    [response] = await service.rounds([service.commit(1, [5], [6], ask=0)])
    [proposal] = response.proposals
    assert (proposal.status, proposal.base_length, list(proposal.token_ids)) == (OK, 2, [])


async def test_an_ask_past_its_need_by_is_acknowledged_without_a_draft(service: Any) -> None:
    await service.opened(1, [5])
    frame = drafter_pb2.RoundsRequest(frame=1, commits=[service.commit(1, [5], [6], need_by_us=1000)])
    received = asyncio.Event()
    receive = service.drafting.receive

    def slow_receive(*args: object) -> None:
        receive(*args)  # type: ignore[arg-type]
        service.clock.now += 0.002
        received.set()

    service.drafting.receive = slow_receive  # type: ignore[method-assign, assignment]
    call = service.stub.Rounds()
    try:
        await call.write(frame)
        response = await call.read()
    finally:
        call.cancel()
    assert received.is_set()
    [proposal] = response.proposals
    assert (proposal.status, proposal.base_length, list(proposal.token_ids)) == (OK, 2, [])
    assert response.hold_us == 2000


async def test_64_sessions_of_one_frame_are_answered_in_one(service: Any) -> None:
    prompts = {i: [i + 1, i + 2] for i in range(64)}
    for i, prompt in prompts.items():
        await service.opened(i, prompt)
    [response] = await service.rounds([service.commit(i, prompt, []) for i, prompt in prompts.items()])
    assert {p.session_id: list(p.token_ids) for p in response.proposals} == {
        i: service.null_chain(prompt, 2, 4) for i, prompt in prompts.items()
    }


async def test_sessions_outlive_a_rounds_stream(service: Any) -> None:
    await service.opened(1, [5])
    [first] = await service.rounds([service.commit(1, [5], [6])])
    [again] = await service.rounds([service.commit(1, [5], [6, 7])])
    assert first.proposals[0].base_length == 2
    assert again.frame == 1
    assert again.proposals[0].base_length == 3


async def test_unknown_session_generation_and_prefix(service: Any) -> None:
    await service.opened(1, [5, 6], generation=3)
    [response] = await service.rounds(
        [
            service.commit(9, [5], []),
            service.commit(1, [5, 6], [], generation=2),
        ],
    )
    assert [(p.session_id, p.status) for p in response.proposals] == [(9, UNKNOWN), (1, UNKNOWN)]
    [newer] = await service.rounds([service.commit(1, [5, 6], [], generation=4)])
    assert newer.proposals[0].status == UNKNOWN
    [gap] = await service.rounds([service.commit(1, [5, 6, 7], [], generation=3)])
    [other] = await service.rounds([service.commit(1, [5, 9], [1], generation=3)])
    assert gap.proposals[0].status == other.proposals[0].status == MISMATCH
    [fine] = await service.rounds([service.commit(1, [5, 6], [], generation=3)])
    assert fine.proposals[0].status == OK


async def test_a_committed_token_outside_the_vocabulary_drops_the_session(service: Any) -> None:
    await service.opened(1, [5])
    [response] = await service.rounds([service.commit(1, [5], [VOCAB])])
    assert response.proposals[0].status == UNKNOWN
    assert len(service.table) == 0


@pytest.mark.parametrize("method", ["Rounds", "Sessions"])
async def test_malformed_bytes_are_the_callers_mistake(service: Any, method: str) -> None:
    call = service.channel.stream_stream(f"/paceline.v1.Drafter/{method}")(iter([b"\xff\xff"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_half_closed_stream_gets_all_it_is_owed(service: Any) -> None:
    await service.opened(1, [5])
    service.drafting.rtt_s = 1e-3
    frame = drafter_pb2.RoundsRequest(frame=1, commits=[service.commit(1, [5], [])])
    call = service.stub.Rounds(iter([frame]))
    answers = [response async for response in call]
    assert [len(a.proposals) for a in answers] == [1]
    assert answers[0].hold_us == 0  # the added network time is not held here


async def test_cancellation_leaves_no_tasks(service: Any) -> None:
    await service.opened(1, [5])
    before = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}
    call = service.stub.Rounds()
    await call.write(drafter_pb2.RoundsRequest(frame=1, commits=[service.commit(1, [5], [])]))
    await call.read()
    assert not service.servicer.idle.is_set()
    call.cancel()
    async with asyncio.timeout(10):
        await service.servicer.idle.wait()
        left = [t for t in asyncio.all_tasks() if t.get_coro().__qualname__ not in before]
        await asyncio.gather(*left, return_exceptions=True)


async def test_a_slow_reader_gets_the_newest_answer_of_each_session(service: Any) -> None:
    """Nothing is read while more is answered than the transport's window holds."""
    await service.opened(1, [5])
    service_commits = [service.commit(1, [5], [], ask=16)]
    call = service.stub.Rounds()
    try:
        for number in range(1, 301):
            await call.write(drafter_pb2.RoundsRequest(frame=number, commits=service_commits))
        newest = 0
        while newest < 300:
            response = await call.read()
            assert response.frame > newest
            assert [p.session_id for p in response.proposals] == [1]
            newest = response.frame
    finally:
        call.cancel()
