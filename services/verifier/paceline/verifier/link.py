"""The link to one drafter: connection, handshake, and the sessions that live on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.core.errors import ErrorKind, PacelineError
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.verifier.choice import Choice
from paceline.verifier.reports import Reports
from paceline.verifier.sessions import Sessions
from paceline.wire.channels import open_channel
from paceline.wire.tasks import end_if_cancelled
from paceline.wire.telemetry import get_logger
from paceline.wire.worker import PROTOCOL_VERSION

_log = get_logger(__name__)

MAX_UNANSWERED_FRAMES = 4
REMEMBERED_FRAMES = 64
"""Times of sent frames that are kept: a drafter may answer one frame in parts."""
DESCRIBE_TIMEOUT_S = 2.0
SMOOTHING = 0.2
FIRST_ACCEPTANCE = 0.5
ACCEPTANCE_SMOOTHING = 0.05
"""For each verified token that counts."""


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What a drafter must agree with; an empty fingerprint is not compared."""

    tokenizer_fingerprint: str
    vocab_size: int


def mismatch(target: TargetIdentity, drafter: worker_pb2.DescribeResponse) -> str | None:
    """Why a drafter cannot draft for the target, or None.

    With equal tokenizers, vocabularies of different size differ by padding only.
    """
    if drafter.role != worker_pb2.WORKER_ROLE_DRAFTER:
        return "is not a drafter"
    if drafter.protocol != PROTOCOL_VERSION:
        return f"speaks protocol {drafter.protocol}, want {PROTOCOL_VERSION}"
    if drafter.tokenizer_fingerprint and target.tokenizer_fingerprint:
        if drafter.tokenizer_fingerprint != target.tokenizer_fingerprint:
            return (
                f"has another tokenizer ({drafter.tokenizer_fingerprint[:12]}, "
                f"want {target.tokenizer_fingerprint[:12]})"
            )
    elif drafter.vocab_size not in (0, target.vocab_size):
        return f"has a vocabulary of {drafter.vocab_size}, want {target.vocab_size}"
    return None


@dataclass(slots=True)
class LinkSettings:
    """Seconds. A drafter that leaves an ask unanswered for ``silence_s`` is taken for lost."""

    silence_s: float = 5.0
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0
    delay_s: float = 0.0
    """Testing: added to the round trip."""


class DrafterLink:
    """Everything but `run` is synchronous: the step loop leaves what it wants and never waits for a write.

    Args:
        news: called with a choice when something arrived for it.
        stale: called with the reason when something that arrived was not used.
    """

    def __init__(
        self,
        drafter_id: str,
        kind: str,
        address: str,
        *,
        target: TargetIdentity,
        settings: LinkSettings,
        reports: Reports,
        news: Callable[[Choice], None],
        stale: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.id = drafter_id
        self.kind = kind
        self.ready = False
        self.responsive = False
        """An answer came since the last hold that ended without one: worth holding for again."""
        self.refusal: str | None = None
        self.expected_s = 0.0
        """Smoothed time from a frame to its answer."""
        self.acceptance = FIRST_ACCEPTANCE
        """Smoothed chance that a verified token is accepted given those before it."""
        self.answers = 0
        self.sessions = Sessions(stale, news)
        self._address = address
        self._target = target
        self._settings = settings
        self._reports = reports
        self._stale = stale
        self._clock = clock
        self._sent: dict[int, float] = {}
        self._frame = 0
        self._answered = 0
        self._room = asyncio.Event()
        self._connection = 0

    def expected_in_s(self, choice: Choice, now_s: float) -> float | None:
        """Seconds until the answer to this choice's ask is expected (perhaps past); None without an ask."""
        asked_s = self.sessions.asked_at(choice, now_s)
        return None if asked_s is None else asked_s + self.expected_s - now_s

    def verified(self, verified: int, accepted: int) -> None:
        """Learns from a round; verified tokens after the first rejection say nothing."""
        trials = min(verified, accepted + 1)
        for index in range(trials):
            self.acceptance += ACCEPTANCE_SMOOTHING * ((index < accepted) - self.acceptance)

    async def run(self) -> None:
        """Keeps the link up until cancelled."""
        backoff_s = self._settings.backoff_s
        while True:
            answers = self.answers
            reason = "closed"
            try:
                await self._connect()
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except PacelineError as error:
                reason = error.message
            except asyncio.InvalidStateError:
                # A write met a stream that had just ended.
                reason = "closed"
            except Exception as error:  # noqa: BLE001 - supervised loop: logged, then tried again
                _log.exception("drafter_link_failed", drafter=self.id)
                reason = repr(error)
            finally:
                was_ready = self.ready
                self._lose()
            end_if_cancelled()
            if was_ready:
                _log.warning("drafter_lost", drafter=self.id, reason=reason)
            if self.answers > answers:
                backoff_s = self._settings.backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._settings.max_backoff_s)

    async def _connect(self) -> None:
        async with open_channel(self._address) as channel:
            await self._handshake(worker_pb2_grpc.WorkerStub(channel))
            stub = drafter_pb2_grpc.DrafterStub(channel)
            rounds, sessions = stub.Rounds(), stub.Sessions()
            self._connection += 1
            self._frame = self._answered = 0
            self.ready = self.responsive = True
            tasks = [
                asyncio.ensure_future(work)
                for work in (
                    self._write_rounds(rounds),
                    self._read_rounds(rounds),
                    self._write_sessions(sessions),
                    self._read_sessions(sessions),
                    self._watch(),
                )
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                rounds.cancel()
                sessions.cancel()

    async def _handshake(self, worker: Any) -> None:
        request = worker_pb2.DescribeRequest(protocol=PROTOCOL_VERSION)
        described: worker_pb2.DescribeResponse = await worker.Describe(request, timeout=DESCRIBE_TIMEOUT_S)
        problem = mismatch(self._target, described)
        if problem is not None:
            if problem != self.refusal:
                _log.error("drafter_refused", drafter=self.id, reason=problem)
            self.refusal = problem
            raise PacelineError(ErrorKind.FAILED_PRECONDITION, f"drafter {self.id} {problem}")
        if described.state == worker_pb2.WORKER_STATE_DRAINING:
            raise PacelineError(ErrorKind.UNAVAILABLE, f"drafter {self.id} is draining")
        self.refusal = None
        self.kind = described.engine or self.kind
        self.sessions.max_context_tokens = described.max_context_tokens
        _log.info("drafter_ready", drafter=self.id, kind=self.kind)

    def _lose(self) -> None:
        self.ready = self.responsive = False
        self._connection += 1
        self._sent.clear()
        self.sessions.clear()

    async def _write_rounds(self, call: Any) -> None:
        while True:
            await self.sessions.asks.wait()
            while self._frame - self._answered >= MAX_UNANSWERED_FRAMES:
                self._room.clear()
                await self._room.wait()
            now_s = self._clock()
            commits = self.sessions.take_commits(self._frame + 1, now_s)
            if commits:
                self._frame += 1
                self._sent[self._frame] = now_s
                self._sent.pop(self._frame - REMEMBERED_FRAMES, None)
                await call.write(drafter_pb2.RoundsRequest(frame=self._frame, commits=commits))

    async def _read_rounds(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        async for response in call:
            if self._settings.delay_s > 0:
                loop.call_later(self._settings.delay_s, self._deliver, response, self._connection)
            else:
                self._deliver(response, self._connection)

    def _deliver(self, response: drafter_pb2.RoundsResponse, connection: int) -> None:
        if connection != self._connection:
            return
        now_s = self._clock()
        sent_s = self._sent.get(response.frame)
        elapsed_s = hold_s = None
        if sent_s is not None:
            self._answered = max(self._answered, response.frame)
            self._room.set()
            self.answers += 1
            self.responsive = True
            elapsed_s = now_s - sent_s
            hold_s = min(response.hold_us * 1e-6, elapsed_s)
            self.expected_s += (elapsed_s - self.expected_s) * (SMOOTHING if self.expected_s else 1.0)
        for proposal in response.proposals:
            choice = self.sessions.deliver(proposal, response.frame)
            if choice is None or elapsed_s is None or hold_s is None:
                continue
            queue_s, compute_s = proposal.queue_us * 1e-6, proposal.compute_us * 1e-6
            choice.times.draft_s += queue_s + compute_s
            choice.times.network_s += elapsed_s - hold_s
            self._reports.drafter(self.id, self.kind).proposal(
                len(proposal.token_ids),
                elapsed_s=elapsed_s,
                hold_s=hold_s,
                queue_s=queue_s,
                compute_s=compute_s,
            )

    async def _write_sessions(self, call: Any) -> None:
        while True:
            await self.sessions.actions.wait()
            for request in self.sessions.take_actions():
                await call.write(request)

    async def _read_sessions(self, call: Any) -> None:
        async for response in call:
            if response.HasField("opened"):
                self.sessions.opened(response.opened)
            elif response.HasField("refused"):
                self.sessions.refused(response.refused)

    async def _watch(self) -> None:
        """Raises once an ask stays unanswered for too long."""
        silence_s = self._settings.silence_s
        while True:
            await asyncio.sleep(silence_s / 4)
            oldest_s = self.sessions.oldest_ask_s()
            if oldest_s is not None and self._clock() - oldest_s > silence_s:
                raise PacelineError(ErrorKind.DEADLINE_EXCEEDED, f"silent for {silence_s:g} s")
