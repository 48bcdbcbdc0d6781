"""Draft sessions of the choices on one link: opened, asked, answered, opened again after a loss."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from paceline.v1 import common_pb2, drafter_pb2
from paceline.verifier.choice import Choice
from paceline.wire.convert import sampling_to_proto

MAX_CHUNK_TOKENS = 16_384
MAX_SKIPPED_ASKS = 255
_FAILURES: dict[int, str] = {
    drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION: "session_unknown_to_drafter",
    drafter_pb2.PROPOSAL_STATUS_PREFIX_MISMATCH: "prefix_mismatch",
}


class _State(Enum):
    CLOSED = auto()
    OPENING = auto()
    OPEN = auto()


@dataclass(slots=True)
class _Session:
    choice: Choice
    state: _State = _State.CLOSED
    total_tokens: int = 0
    acknowledged: int = 0
    """Length of the choice's tokens that the drafter is known to have."""
    wanted: int = 0
    """Draft length to ask for with the next frame."""
    limit: int = 0
    """Draft length of the last ask."""
    asked_s: float | None = None
    """When the newest ask left; None once it was answered."""
    asked_length: int = 0
    asked_frame: int = 0
    failures: int = 0
    skip: int = 0
    """Asks to let pass before the session is opened again."""


class Sessions:
    """Synchronous state; the link moves it over the wire. ``asks`` and ``actions`` are set while there is
    something to send."""

    def __init__(self, stale: Callable[[str], None], news: Callable[[Choice], None]) -> None:
        self.max_context_tokens = 0
        self.asks = asyncio.Event()
        self.actions = asyncio.Event()
        self._stale = stale
        self._news = news
        self._sessions: dict[int, _Session] = {}
        self._actions: deque[drafter_pb2.SessionsRequest] = deque()

    def __len__(self) -> int:
        return len(self._sessions)

    def ask(self, choice: Choice, tokens: int) -> str | None:
        """Asks for a draft after the choice's present tokens, or says why that is not possible yet.

        Opens the session first where needed; after failures of a session less and less often.
        """
        session = self._sessions.get(choice.session_id)
        if session is None:
            session = self._sessions[choice.session_id] = _Session(choice)
        length = len(choice.sequence.tokens)
        if self.max_context_tokens and length + tokens > self.max_context_tokens:
            return "drafter_context"
        if session.state is _State.CLOSED:
            if session.skip:
                session.skip -= 1
                return "session_failed"
            self._open(session)
        if session.state is _State.OPENING:
            return "opening"
        session.wanted = tokens
        self.asks.set()
        return None

    def open(self, choice: Choice) -> None:
        """Lets the drafter read the prompt while the verifier does."""
        self._open(self._sessions.setdefault(choice.session_id, _Session(choice)))

    def close(self, choice: Choice) -> None:
        """The choice is over or goes to another drafter."""
        session = self._sessions.pop(choice.session_id, None)
        if session is not None and session.state is not _State.CLOSED:
            close = drafter_pb2.CloseSession(session_id=choice.session_id)
            self._act(drafter_pb2.SessionsRequest(close=close))

    def clear(self) -> None:
        """The drafter is lost, and all its state with it."""
        for session in self._sessions.values():
            self._news(session.choice)
        self._sessions.clear()
        self._actions.clear()
        self.asks.clear()
        self.actions.clear()

    def asked_at(self, choice: Choice, now_s: float) -> float | None:
        """When the unanswered ask of the choice left, ``now_s`` if it is about to; None without one."""
        session = self._sessions.get(choice.session_id)
        if session is None:
            return None
        return now_s if session.wanted else session.asked_s

    def oldest_ask_s(self) -> float | None:
        """When the oldest ask that is not answered left; None without one."""
        return min((s.asked_s for s in self._sessions.values() if s.asked_s is not None), default=None)

    def take_commits(self, frame: int, now_s: float) -> list[drafter_pb2.SessionCommit]:
        """One frame: for every session with an ask, all tokens that the drafter may not have."""
        self.asks.clear()
        commits = []
        for session_id, session in self._sessions.items():
            if not session.wanted or session.state is not _State.OPEN:
                continue
            tokens = session.choice.sequence.tokens
            commits.append(
                drafter_pb2.SessionCommit(
                    session_id=session_id,
                    session_gen=session.choice.session_gen,
                    base_length=session.acknowledged,
                    prefix_hash=session.choice.inbox.hashes.at(session.acknowledged),
                    token_ids=tokens[session.acknowledged :],
                    ask_tokens=session.wanted,
                )
            )
            session.limit, session.wanted = session.wanted, 0
            session.asked_s, session.asked_length, session.asked_frame = now_s, len(tokens), frame
        return commits

    def take_actions(self) -> Iterator[drafter_pb2.SessionsRequest]:
        self.actions.clear()
        while self._actions:
            yield self._actions.popleft()

    def deliver(self, proposal: drafter_pb2.SessionProposal, frame: int) -> Choice | None:
        """Hands a proposal to its choice; None if it belongs to none.

        Args:
            frame: the newest frame that the drafter had taken in.
        """
        session = self._sessions.get(proposal.session_id)
        if session is None:
            self._stale("unknown_session")
            return None
        choice = session.choice
        if proposal.session_gen != choice.session_gen or session.state is not _State.OPEN:
            self._stale("wrong_generation")
            return None
        if proposal.status != drafter_pb2.PROPOSAL_STATUS_OK:
            self._fail(session, _FAILURES.get(proposal.status, "unknown_status"))
            return None
        if session.limit == 0:
            self._stale("unasked")
            return None
        reason = choice.inbox.arrive(
            proposal.base_length, proposal.prefix_hash, proposal.token_ids, session.limit
        )
        if reason is not None:
            self._stale(reason)
        if reason != "wrong_base":
            session.acknowledged = max(session.acknowledged, proposal.base_length)
            session.failures = 0
        if frame >= session.asked_frame or proposal.base_length >= session.asked_length:
            session.asked_s = None
        self._news(choice)
        return choice

    def opened(self, opened: drafter_pb2.SessionOpened) -> None:
        session = self._sessions.get(opened.session_id)
        if session is None or session.state is not _State.OPENING:
            self._stale("unknown_session")
        elif opened.session_gen != session.choice.session_gen or opened.length != session.total_tokens:
            self._stale("wrong_generation")
        else:
            session.state = _State.OPEN
            session.acknowledged = opened.length
            self._news(session.choice)

    def refused(self, refused: drafter_pb2.SessionRefused) -> None:
        session = self._sessions.get(refused.session_id)
        if session is None or refused.session_gen != session.choice.session_gen:
            self._stale("unknown_session")
        else:
            self._fail(session, "session_refused")

    def _fail(self, session: _Session, reason: str) -> None:
        self._stale(reason)
        session.state = _State.CLOSED
        session.wanted = session.limit = 0
        session.asked_s = None
        session.skip = min((1 << session.failures) - 1, MAX_SKIPPED_ASKS)
        session.failures = min(session.failures + 1, 8)
        self._news(session.choice)

    def _open(self, session: _Session) -> None:
        choice = session.choice
        sequence = choice.sequence
        choice.session_gen += 1
        session.state = _State.OPENING
        session.total_tokens = len(sequence.tokens)
        for offset in range(0, session.total_tokens, MAX_CHUNK_TOKENS):
            chunk = drafter_pb2.OpenSession(
                session_id=choice.session_id,
                session_gen=choice.session_gen,
                offset=offset,
                total_tokens=session.total_tokens,
                token_ids=sequence.tokens[offset : offset + MAX_CHUNK_TOKENS],
            )
            if offset == 0:
                chunk.sampling.CopyFrom(
                    drafter_pb2.DraftSampling(
                        params=sampling_to_proto(sequence.params),
                        noise_key=sequence.noise_key,
                        prompt_tokens=sequence.prompt_tokens,
                        mode=common_pb2.SPECULATION_MODE_COUPLED,
                    )
                )
            self._act(drafter_pb2.SessionsRequest(open=chunk))

    def _act(self, request: drafter_pb2.SessionsRequest) -> None:
        self._actions.append(request)
        self.actions.set()
