"""Answers on their way to one verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from paceline.core.errors import PacelineError
from paceline.v1 import drafter_pb2


@dataclass(slots=True)
class _Frame:
    number: int
    arrived_s: float
    delay_s: float


class RoundStream:
    """Answers to one verifier, waiting to be written.

    One slot a session, newest wins: a verifier that reads slowly costs bounded memory and delays nobody.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: dict[int, drafter_pb2.SessionProposal] = {}
        self._frame: _Frame | None = None
        self._news = asyncio.Event()
        self._delayed = 0
        self._ended = False
        self._error: PacelineError | None = None

    def post(
        self, frame: int, arrived_s: float, proposals: Iterable[drafter_pb2.SessionProposal], delay_s: float
    ) -> None:
        """Queues one response; ``delay_s`` is added network time (tests), not counted as held here."""
        answer = _Frame(frame, arrived_s, delay_s)
        if delay_s > 0:
            self._delayed += 1
            asyncio.get_running_loop().call_later(delay_s, self._put_delayed, answer, list(proposals))
        else:
            self._put(answer, proposals)

    def end(self, error: PacelineError | None = None) -> None:
        """The verifier sends no more: ``responses`` ends once everything owed is written, or fails."""
        self._ended, self._error = True, error
        self._news.set()

    async def responses(self, owed: Callable[[], bool]) -> AsyncIterator[drafter_pb2.RoundsResponse]:
        """Every response until the end; ``owed`` tells whether a batch still works for this stream."""
        while True:
            if self._error is not None:
                raise self._error
            if self._frame is not None:
                yield self._take(self._frame)
                continue
            if self._ended and not self._delayed and not owed():
                return
            self._news.clear()
            await self._news.wait()

    def _take(self, frame: _Frame) -> drafter_pb2.RoundsResponse:
        slots, self._slots, self._frame = self._slots, {}, None
        held_s = self._clock() - frame.arrived_s - frame.delay_s
        return drafter_pb2.RoundsResponse(
            frame=frame.number, hold_us=microseconds(held_s), proposals=slots.values()
        )

    def _put_delayed(self, answer: _Frame, proposals: Iterable[drafter_pb2.SessionProposal]) -> None:
        self._delayed -= 1
        self._put(answer, proposals)

    def _put(self, answer: _Frame, proposals: Iterable[drafter_pb2.SessionProposal]) -> None:
        if self._frame is None or answer.number >= self._frame.number:
            self._frame = answer
        for proposal in proposals:
            self._slots[proposal.session_id] = proposal
        self._news.set()


def microseconds(seconds: float) -> int:
    """As the protocol's uint32."""
    return max(0, min(0xFFFFFFFF, round(seconds * 1e6)))
