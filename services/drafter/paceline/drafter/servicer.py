"""The Drafter service over the wire: sessions and rounds of every verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ErrorKind, PacelineError, invalid
from paceline.core.types import SpeculationMode
from paceline.drafter.kinds import DraftSession
from paceline.drafter.rounds import Drafting
from paceline.drafter.sessions import SessionTable
from paceline.drafter.stream import RoundStream
from paceline.v1 import drafter_pb2, drafter_pb2_grpc
from paceline.wire.convert import mode_from_proto, sampling_from_proto

MAX_CHUNK_TOKENS = 16_384
_SLICE_TOKENS = 1_024
"""A chunk is indexed in slices of this size, so that rounds go on between them."""


@dataclass(slots=True)
class _SessionStream:
    """What one Sessions stream has done so far."""

    opened: dict[int, int] = field(default_factory=dict)
    """Sessions begun and not closed since, with their newest generation."""
    refused: tuple[int, int] | None = None
    """Id and generation whose further chunks are ignored."""


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """Translates between messages and `SessionTable` and `Drafting`.

    A session lives no longer than the Sessions stream that opened its newest generation; Rounds streams may
    come and go.
    """

    def __init__(self, table: SessionTable, drafting: Drafting, clock: Callable[[], float]) -> None:
        self._table = table
        self._drafting = drafting
        self._clock = clock
        self._streams = 0
        self.draining = False
        """Refuse new sessions; those open go on."""
        self.idle = asyncio.Event()
        """Set while no session is open, or no verifier is connected that could use one."""
        self.idle.set()

    async def Rounds(
        self, request_iterator: AsyncIterator[drafter_pb2.RoundsRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.RoundsResponse]:
        drafting = self._drafting
        stream = RoundStream(self._clock)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        self._streams += 1
        self._note_idle()
        try:
            async for response in stream.responses(lambda: drafting.owes(stream)):
                yield response
        finally:
            self._streams -= 1
            self._note_idle()
            drafting.forget(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, stream: RoundStream, requests: AsyncIterator[drafter_pb2.RoundsRequest]) -> None:
        try:
            async for request in requests:
                self._drafting.receive(stream, request)
                self._note_idle()
        except PacelineError as error:
            stream.end(error)
        else:
            stream.end()

    async def Sessions(
        self, request_iterator: AsyncIterator[drafter_pb2.SessionsRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.SessionsResponse]:
        stream = _SessionStream()
        try:
            async for request in request_iterator:
                if request.WhichOneof("action") == "close":
                    stream.opened.pop(request.close.session_id, None)
                    self._table.close(request.close.session_id)
                else:
                    response = await self._answer_open(request.open, stream)
                    if response is not None:
                        yield response
                self._note_idle()
        finally:
            # Whether the verifier ended the stream or was lost, nobody else would close these.
            for session_id, generation in stream.opened.items():
                self._table.close(session_id, generation)
            self._note_idle()

    async def _answer_open(
        self, chunk: drafter_pb2.OpenSession, stream: _SessionStream
    ) -> drafter_pb2.SessionsResponse | None:
        """The answer to a session's last chunk, or to the first that is refused; None to all others."""
        session_id, generation = key = (chunk.session_id, chunk.session_gen)
        if chunk.offset and key == stream.refused:
            return None
        try:
            session = await self._open(chunk)
        except PacelineError as error:
            stream.refused = key
            refused = drafter_pb2.SessionRefused(
                session_id=session_id, session_gen=generation, reason=error.message
            )
            return drafter_pb2.SessionsResponse(refused=refused)
        stream.opened[session_id] = generation
        self._drafting.wake()
        if session is None:
            return None
        opened = drafter_pb2.SessionOpened(
            session_id=session_id, session_gen=generation, length=session.total_tokens
        )
        return drafter_pb2.SessionsResponse(opened=opened)

    async def _open(self, chunk: drafter_pb2.OpenSession) -> DraftSession | None:
        if len(chunk.token_ids) > MAX_CHUNK_TOKENS:
            raise invalid("token_ids", f"must have at most {MAX_CHUNK_TOKENS} ids a chunk")
        if chunk.offset == 0:
            self._begin(chunk)
        token_ids = list(chunk.token_ids)
        session = None
        for start in range(0, max(1, len(token_ids)), _SLICE_TOKENS):
            if start:
                await asyncio.sleep(0)
            part = token_ids[start : start + _SLICE_TOKENS]
            session = self._table.append(chunk.session_id, chunk.session_gen, chunk.offset + start, part)
        return session

    def _begin(self, chunk: drafter_pb2.OpenSession) -> None:
        if self.draining:
            raise PacelineError(ErrorKind.UNAVAILABLE, "drafter: draining, takes no new sessions")
        if not chunk.HasField("sampling"):
            raise invalid("sampling", "must come with the first chunk")
        if mode_from_proto(chunk.sampling.mode) is SpeculationMode.REJECTION:
            raise invalid("sampling.mode", "must be coupled: this drafter does not sample for rejection")
        self._table.begin(
            chunk.session_id,
            chunk.session_gen,
            total_tokens=chunk.total_tokens,
            prompt_tokens=chunk.sampling.prompt_tokens,
            params=sampling_from_proto(chunk.sampling.params, vocab_size=self._table.vocab_size),
            noise_key=chunk.sampling.noise_key,
        )

    def _note_idle(self) -> None:
        if len(self._table) and self._streams:
            self.idle.clear()
        else:
            self.idle.set()
