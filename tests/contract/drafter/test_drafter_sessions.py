"""Opening and closing draft sessions over loopback gRPC."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from paceline.v1 import common_pb2, drafter_pb2

OK = drafter_pb2.PROPOSAL_STATUS_OK
UNKNOWN = drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION
VOCAB = 5000


async def test_a_long_session_opens_in_chunks(service: Any) -> None:
    tokens = [i % VOCAB for i in range(40_000)]
    await service.opened(3, tokens)
    [response] = await service.rounds([service.commit(3, tokens, [], ask=1)])
    assert response.proposals[0].base_length == 40_000


async def test_sessions_end_with_the_stream_that_opened_them(service: Any) -> None:
    """Session 2 is half open in a newer generation; session 3 was opened anew by another stream."""
    rounds_call, sessions_call = service.stub.Rounds(), service.stub.Sessions()
    try:
        for session_id in (1, 2, 3):
            await sessions_call.write(service.chunks(session_id, [5], generation=2)[0])
            assert (await sessions_call.read()).opened.session_id == session_id
        await sessions_call.write(service.chunks(2, [5, 6], generation=3, size=1)[0])
        await service.opened(3, [5], generation=4)
        await rounds_call.write(drafter_pb2.RoundsRequest(frame=1, commits=[service.commit(9, [5], [])]))
        await rounds_call.read()
        sessions_call.cancel()
        service.table.close(3)
        async with asyncio.timeout(10):
            await service.servicer.idle.wait()
        assert len(service.table) == 0
    finally:
        rounds_call.cancel()


async def test_an_older_stream_that_ends_spares_a_newer_generation(service: Any) -> None:
    await service.sessions(service.chunks(2, [5]))
    older = service.stub.Sessions()
    await older.write(service.chunks(1, [5], generation=1)[0])
    await older.read()
    await service.opened(1, [6], generation=2)
    await older.done_writing()
    assert await older.read() is grpc.aio.EOF
    assert [service.table.get(i) is not None for i in (1, 2)] == [True, False]


async def test_a_newer_generation_replaces_and_an_older_is_refused(service: Any) -> None:
    await service.opened(1, [5, 6], generation=2)
    await service.opened(1, [7], generation=3)
    [response] = await service.sessions(service.chunks(1, [5, 6], generation=2))
    assert "session_gen" in response.refused.reason
    [answer] = await service.rounds([service.commit(1, [7], [], generation=3)])
    assert answer.proposals[0].status == OK


async def test_close_ends_the_session(service: Any) -> None:
    await service.opened(1, [5])
    close = drafter_pb2.SessionsRequest(close=drafter_pb2.CloseSession(session_id=1))
    assert await service.sessions([close, close]) == []
    [response] = await service.rounds([service.commit(1, [5], [])])
    assert response.proposals[0].status == UNKNOWN


def altered(message: drafter_pb2.SessionsRequest, **fields: object) -> drafter_pb2.SessionsRequest:
    copy = drafter_pb2.SessionsRequest.FromString(message.SerializeToString())
    for name, value in fields.items():
        setattr(copy.open, name, value)
    return copy


BAD_OPENS: dict[str, tuple[Callable[..., Any], str]] = {
    "vocabulary": (lambda chunks: chunks(1, [1, VOCAB]), "token_ids"),
    "order": (lambda chunks: chunks(1, [1, 2, 3], size=1)[::2], "offset"),
    "middle": (lambda chunks: chunks(1, [1, 2], size=1)[1:], "offset"),
    "beyond total": (
        lambda chunks: [altered(chunks(1, [1, 2])[0], total_tokens=1)],
        "sampling.prompt_tokens",
    ),
    "empty": (lambda chunks: [altered(chunks(1, [1])[0], total_tokens=0)], "total_tokens"),
    "endless": (lambda chunks: [altered(chunks(1, [1])[0], total_tokens=2**31)], "total_tokens"),
    "large chunk": (lambda chunks: chunks(1, [1] * 16_385, size=16_385), "token_ids"),
    "rejection": (lambda chunks: chunks(1, [1], mode=common_pb2.SPECULATION_MODE_REJECTION), "sampling.mode"),
}


@pytest.mark.parametrize("case", BAD_OPENS)
async def test_a_bad_open_is_refused_once_with_its_field(service: Any, case: str) -> None:
    make, field = BAD_OPENS[case]
    [response] = await service.sessions(make(service.chunks))
    assert response.refused.session_id == 1
    assert response.refused.reason.startswith(f"{field}:")
    await service.opened(1, [5])


async def test_a_chunk_beyond_the_total_is_refused(service: Any) -> None:
    first, second = service.chunks(1, [1, 2], size=1)
    second.open.token_ids.append(3)
    [response] = await service.sessions([first, second])
    assert "total_tokens (2)" in response.refused.reason


async def test_sampling_is_required_and_checked(service: Any) -> None:
    [bare] = service.chunks(1, [1])
    bare.open.ClearField("sampling")
    [wrong] = service.chunks(2, [1])
    wrong.open.sampling.params.top_p = 2
    answers = await service.sessions([bare, wrong])
    assert [a.refused.reason.split(":")[0] for a in answers] == ["sampling", "sampling.top_p"]


async def test_draining_refuses_new_sessions_and_serves_open_ones(service: Any) -> None:
    await service.opened(1, [5])
    service.servicer.draining = True
    [response] = await service.sessions(service.chunks(2, [5]))
    assert "draining" in response.refused.reason
    [answer] = await service.rounds([service.commit(1, [5], [])])
    assert answer.proposals[0].status == OK
