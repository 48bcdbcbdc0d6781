"""Batching of asks over streams, with a blocking kind that the test holds."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from paceline.core.tokens import prefix_hash
from paceline.core.types import SamplingParams
from paceline.drafter.kinds import Ask, Proposal
from paceline.drafter.null import NullKind, TimedKind
from paceline.drafter.rounds import BatchStats, Drafting
from paceline.drafter.sessions import SessionTable
from paceline.drafter.stream import RoundStream
from paceline.v1 import drafter_pb2

OK = drafter_pb2.PROPOSAL_STATUS_OK
UNKNOWN = drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


class HeldKind(NullKind):
    """Each batch waits in the worker thread until the test lets it go on."""

    blocking = True

    def __init__(self) -> None:
        super().__init__(5000)
        self.batches: list[list[tuple[int, int]]] = []
        self.started = asyncio.Queue[None]()
        self.go_on = threading.Semaphore(0)
        self.fail = False
        self._loop = asyncio.get_running_loop()

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self.batches.append([(ask.session.id, ask.k) for ask in asks])
        self._loop.call_soon_threadsafe(self.started.put_nowait, None)
        assert self.go_on.acquire(timeout=30)
        if self.fail:
            raise RuntimeError("no draft")
        return super().propose(asks)


class Bench:
    def __init__(self) -> None:
        self.kind = HeldKind()
        self.clock = Clock()
        self.table = SessionTable(self.kind, max_sessions=8)
        self.stats: list[BatchStats] = []
        self.stale: list[str] = []
        self.drafting = Drafting(
            self.kind, self.table, clock=self.clock, observe=self.stats.append, stale=self.stale.append
        )
        for session_id in (1, 2, 3):
            self.open(session_id)

    def open(self, session_id: int, generation: int = 1) -> None:
        self.table.begin(
            session_id, generation, total_tokens=1, prompt_tokens=1, params=SamplingParams(), noise_key=0
        )
        self.table.append(session_id, generation, 0, [session_id])

    def ask(self, stream: RoundStream, frame: int, asks: dict[int, int], need_by_us: int = 0) -> None:
        commits = [
            drafter_pb2.SessionCommit(
                session_id=session_id,
                session_gen=1,
                base_length=1,
                prefix_hash=prefix_hash([session_id]),
                ask_tokens=k,
                need_by_us=need_by_us,
            )
            for session_id, k in asks.items()
        ]
        self.drafting.receive(stream, drafter_pb2.RoundsRequest(frame=frame, commits=commits))

    async def answer(self, stream: RoundStream) -> drafter_pb2.RoundsResponse:
        async with asyncio.timeout(30):
            return await anext(stream.responses(lambda: True))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    task = asyncio.create_task(made.drafting.run())
    yield made
    made.kind.go_on.release(100)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_batch_serves_all_streams_and_the_newest_ask_wins(bench: Bench) -> None:
    a, b = RoundStream(bench.clock), RoundStream(bench.clock)
    bench.ask(a, 1, {1: 2})
    await bench.kind.started.get()
    bench.ask(a, 2, {1: 3, 2: 3})
    bench.ask(b, 1, {3: 5})
    bench.ask(a, 3, {2: 4})
    bench.clock.now += 1.0
    bench.kind.go_on.release()
    first = await bench.answer(a)
    await bench.kind.started.get()
    bench.clock.now += 0.5
    bench.kind.go_on.release()
    second, other = await bench.answer(a), await bench.answer(b)

    assert bench.kind.batches == [[(1, 2)], [(1, 3), (2, 4), (3, 5)]]
    assert (first.frame, first.hold_us) == (1, 1_000_000)
    assert (first.proposals[0].queue_us, first.proposals[0].compute_us) == (0, 1_000_000)
    assert (second.frame, second.hold_us) == (3, 1_500_000)
    assert [p.session_id for p in second.proposals] == [1, 2]
    assert {(p.queue_us, p.compute_us) for p in second.proposals} == {(1_000_000, 500_000)}
    assert [len(p.token_ids) for p in other.proposals] == [5]
    assert [(s.sessions, s.seconds) for s in bench.stats[:1]] == [(1, 1.0)]


async def test_an_ask_that_waited_past_its_need_by_is_not_drafted(bench: Bench) -> None:
    a, b = RoundStream(bench.clock), RoundStream(bench.clock)
    bench.ask(a, 1, {1: 2})
    await bench.kind.started.get()
    bench.ask(b, 1, {2: 2}, need_by_us=1000)
    bench.clock.now += 0.002
    bench.kind.go_on.release()
    [proposal] = (await bench.answer(b)).proposals
    assert (proposal.status, len(proposal.token_ids), proposal.base_length) == (OK, 0, 1)
    assert bench.kind.batches == [[(1, 2)]]
    assert bench.stale == ["past_need_by"]


async def test_a_session_closed_while_it_waits_is_unknown(bench: Bench) -> None:
    stream = RoundStream(bench.clock)
    bench.ask(stream, 1, {1: 2})
    await bench.kind.started.get()
    bench.ask(stream, 2, {2: 2, 3: 2})
    bench.table.close(2)
    bench.open(3, generation=2)
    bench.kind.go_on.release()
    statuses = {p.session_id: p.status for p in (await bench.answer(stream)).proposals}
    assert statuses == {1: OK, 2: UNKNOWN, 3: UNKNOWN}
    assert bench.kind.batches == [[(1, 2)]]


async def test_a_failing_kind_costs_a_round(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    stream = RoundStream(bench.clock)
    bench.kind.fail = True
    bench.ask(stream, 1, {1: 2})
    await bench.kind.started.get()
    bench.kind.go_on.release()
    [lost] = (await bench.answer(stream)).proposals
    assert (lost.status, list(lost.token_ids)) == (OK, [])
    bench.kind.fail = False
    bench.ask(stream, 2, {1: 2})
    bench.kind.go_on.release()
    assert len((await bench.answer(stream)).proposals[0].token_ids) == 2


async def test_a_stream_that_is_gone_is_not_drafted_for(bench: Bench) -> None:
    a, b = RoundStream(bench.clock), RoundStream(bench.clock)
    bench.ask(a, 1, {1: 2})
    await bench.kind.started.get()
    bench.ask(b, 1, {2: 2})
    bench.ask(a, 2, {3: 2})
    bench.drafting.forget(b)
    bench.kind.go_on.release(2)
    await bench.kind.started.get()
    assert bench.kind.batches[1] == [(3, 2)]


async def test_slots_merge_until_they_are_written(bench: Bench) -> None:
    stream = RoundStream(bench.clock)
    make = drafter_pb2.SessionProposal
    stream.post(1, 10.0, [make(session_id=1, ask_tokens=1), make(session_id=2, ask_tokens=1)], 0)
    stream.post(2, 10.0, [make(session_id=1, ask_tokens=2)], 0)
    response = await bench.answer(stream)
    assert response.frame == 2
    assert {p.session_id: p.ask_tokens for p in response.proposals} == {1: 2, 2: 1}


def test_a_timed_batch_shares_the_time_of_its_longest_draft() -> None:
    slept: list[float] = []
    kind = TimedKind(5000, 0.002, slept.append)
    table = SessionTable(kind, max_sessions=4)
    for session_id in (1, 2):
        table.begin(
            session_id, 1, total_tokens=1, prompt_tokens=1, params=SamplingParams(), noise_key=session_id
        )
        table.append(session_id, 1, 0, [4])
    sessions = [table.get(1), table.get(2)]
    asks = [Ask(s, 1, k) for s, k in zip(sessions, (3, 5), strict=True) if s is not None]
    proposals = kind.propose(asks)
    assert slept == [pytest.approx(0.010)]
    assert proposals == NullKind(5000).propose(asks)
