"""Rounds: commits in, proposals out, one drafting batch over the sessions of all verifiers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.drafter.kinds import Ask, DraftKind, DraftSession, Proposal
from paceline.drafter.sessions import CommitStatus, SessionTable
from paceline.drafter.stream import RoundStream, microseconds
from paceline.v1 import drafter_pb2
from paceline.wire.settings import MAX_DRAFT_TOKENS
from paceline.wire.telemetry import get_logger

_log = get_logger(__name__)

_STATUS = {
    CommitStatus.OK: drafter_pb2.PROPOSAL_STATUS_OK,
    CommitStatus.UNKNOWN_SESSION: drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION,
    CommitStatus.PREFIX_MISMATCH: drafter_pb2.PROPOSAL_STATUS_PREFIX_MISMATCH,
}


@dataclass(slots=True, eq=False)
class _Pending:
    """The newest ask of a session, and what came of it; without a proposal it is only acknowledged."""

    stream: RoundStream
    session: DraftSession
    frame: int
    arrived_s: float
    ask_tokens: int
    need_by_s: float | None
    base_length: int = 0
    proposal: Proposal | None = None


@dataclass(slots=True)
class BatchStats:
    """One drafting batch: sessions asked, tokens proposed, seconds of compute."""

    sessions: int
    tokens: int
    seconds: float


class Drafting:
    """Applies frames as they come and drafts for everything asked meanwhile, one batch after another.

    Args:
        observe: told of every batch.
        stale: told the reason of every commit or ask that was not used.
    """

    def __init__(
        self,
        kind: DraftKind,
        table: SessionTable,
        *,
        clock: Callable[[], float],
        observe: Callable[[BatchStats], None] = lambda stats: None,
        stale: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.slowdown = 1.0
        """Factor on compute time (testing)."""
        self.rtt_s = 0.0
        """Added to the round trip of every answer (testing)."""
        self._kind = kind
        self._table = table
        self._clock = clock
        self._observe = observe
        self._stale = stale
        self._pending: dict[int, _Pending] = {}
        self._working: frozenset[RoundStream] = frozenset()
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft") if kind.blocking else None

    def receive(self, stream: RoundStream, request: drafter_pb2.RoundsRequest) -> None:
        """Applies a frame's commits now and queues its asks; what needs no drafting is answered at once."""
        now = self._clock()
        at_once = []
        for commit in request.commits:
            status, session = self._table.commit(
                commit.session_id,
                commit.session_gen,
                commit.base_length,
                commit.prefix_hash,
                list(commit.token_ids),
            )
            if status is CommitStatus.OK and session is not None and commit.ask_tokens:
                need_by_s = now + commit.need_by_us * 1e-6 if commit.need_by_us else None
                self._pending[commit.session_id] = _Pending(
                    stream, session, request.frame, now, commit.ask_tokens, need_by_s
                )
                continue
            self._pending.pop(commit.session_id, None)
            if status is not CommitStatus.OK:
                self._stale(status.name.lower())
            answer = drafter_pb2.SessionProposal(
                session_id=commit.session_id, session_gen=commit.session_gen, status=_STATUS[status]
            )
            at_once.append(_acknowledge(answer, session))
        if at_once:
            stream.post(request.frame, now, at_once, self.rtt_s)
        if self._pending:
            self._news.set()

    def wake(self) -> None:
        """A session has news outside the rounds; the kind may want to catch up."""
        self._news.set()

    def forget(self, stream: RoundStream) -> None:
        """Drops what a stream that is gone has asked."""
        self._pending = {i: p for i, p in self._pending.items() if p.stream is not stream}

    def owes(self, stream: RoundStream) -> bool:
        return stream in self._working or any(p.stream is stream for p in self._pending.values())

    async def run(self) -> None:
        """Drafts until cancelled."""
        try:
            while True:
                if self._pending:
                    await self._batch()
                elif self._kind.behind:
                    await self._catch_up()
                else:
                    self._news.clear()
                    await self._news.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=True)

    async def _catch_up(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._kind.catch_up)
        except Exception:  # noqa: BLE001 - the loop's boundary: this session drafts late, the others on
            _log.exception("catch_up_failed")

    async def _batch(self) -> None:
        started_s = self._clock()
        batch, self._pending = list(self._pending.values()), {}
        self._working = frozenset(p.stream for p in batch)
        live = [p for p in batch if self._worth_drafting(p, started_s)]
        if live:
            await self._draft(live)
        compute_s = self._clock() - started_s
        if live and self.slowdown > 1:
            await asyncio.sleep(compute_s * (self.slowdown - 1))
            compute_s = self._clock() - started_s
        by_stream: defaultdict[RoundStream, list[_Pending]] = defaultdict(list)
        for p in batch:
            by_stream[p.stream].append(p)
        self._working = frozenset()
        for stream, group in by_stream.items():
            newest = max(group, key=lambda p: p.frame)
            answers = [self._proposal(p, started_s, compute_s) for p in group]
            stream.post(newest.frame, newest.arrived_s, answers, self.rtt_s)
        if live:
            tokens = sum(len(p.proposal.token_ids) for p in live if p.proposal is not None)
            self._observe(BatchStats(len(live), tokens, compute_s))

    async def _draft(self, live: list[_Pending]) -> None:
        asks = []
        for p in live:
            p.base_length = len(p.session.tokens)
            asks.append(Ask(p.session, p.base_length, min(p.ask_tokens, MAX_DRAFT_TOKENS)))
        try:
            if self._thread is None:
                proposals = self._kind.propose(asks)
            else:
                loop = asyncio.get_running_loop()
                proposals = await loop.run_in_executor(self._thread, self._kind.propose, asks)
        except Exception:  # noqa: BLE001 - the loop's boundary: a lost round, the verifiers decode plainly
            _log.exception("draft_failed", sessions=len(asks))
            return
        for p, proposal in zip(live, proposals, strict=True):
            p.proposal = proposal

    def _worth_drafting(self, pending: _Pending, now_s: float) -> bool:
        if pending.need_by_s is not None and now_s > pending.need_by_s:
            self._stale("past_need_by")
            return False
        return self._is_open(pending)

    def _is_open(self, pending: _Pending) -> bool:
        return self._table.get(pending.session.id) is pending.session

    def _proposal(self, p: _Pending, started_s: float, compute_s: float) -> drafter_pb2.SessionProposal:
        answer = drafter_pb2.SessionProposal(
            session_id=p.session.id,
            session_gen=p.session.generation,
            status=drafter_pb2.PROPOSAL_STATUS_OK,
            ask_tokens=p.ask_tokens,
            queue_us=microseconds(started_s - p.arrived_s),
        )
        if p.proposal is not None:
            answer.token_ids.extend(p.proposal.token_ids)
            answer.confidence = p.proposal.confidence
            answer.compute_us = microseconds(compute_s)
            return _acknowledge(answer, p.session, p.base_length)
        if not self._is_open(p):
            answer.status = drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION
            return answer
        return _acknowledge(answer, p.session)


def _acknowledge(
    answer: drafter_pb2.SessionProposal, session: DraftSession | None, length: int | None = None
) -> drafter_pb2.SessionProposal:
    """Fills in the length that the answer continues, by default all that the session holds."""
    if session is not None:
        answer.base_length = len(session.tokens) if length is None else length
        answer.prefix_hash = session.hashes[answer.base_length]
    return answer
