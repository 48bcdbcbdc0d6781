"""The workers a gateway knows: channels, handshakes, health, and the credit it may grant."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.types import WorkerRole, WorkerState
from paceline.v1 import verifier_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.wire.channels import open_channel
from paceline.wire.convert import worker_role_from_proto, worker_state_from_proto
from paceline.wire.models import ModelFiles
from paceline.wire.status import from_rpc_error
from paceline.wire.tasks import end_if_cancelled
from paceline.wire.telemetry import get_logger
from paceline.wire.worker import PROTOCOL_VERSION

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 5.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 2.0
UNLIMITED_TOKENS = 2**31 - 1
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a verifier must serve to be used by this gateway."""

    model: str
    files: ModelFiles

    def mismatch(self, seen: worker_pb2.DescribeResponse) -> str | None:
        """Why the worker cannot be used, or None."""
        files = self.files
        if seen.model and seen.model != self.model:
            return f"model: serves {seen.model}, the gateway {self.model}"
        if seen.tokenizer_fingerprint and seen.tokenizer_fingerprint != files.tokenizer_fingerprint:
            return "tokenizer_fingerprint: its token ids mean something else"
        if seen.vocab_size and seen.vocab_size != files.vocab_size:
            return f"vocab_size: has {seen.vocab_size}, the gateway's model {files.vocab_size}"
        return None


class WorkerLink:
    """Connection to one worker, kept alive: described every second, reconnected after a loss."""

    def __init__(
        self,
        worker_id: str,
        role: WorkerRole,
        address: str,
        expected: Expected | None,
        on_change: Callable[[], None],
    ) -> None:
        self.id = worker_id
        self.role = role
        self.address = address
        self.running = 0
        self.draining = False
        self.suspected = False
        self._suspicions = 0
        self._probe = asyncio.Event()
        self._expected = expected
        self._on_change = on_change
        self._channel = open_channel(address)
        self._worker: Any = worker_pb2_grpc.WorkerStub(self._channel)
        self.verifier: Any = verifier_pb2_grpc.VerifierStub(self._channel)
        self.described: worker_pb2.DescribeResponse | None = None
        """The last answer while the worker is connected and fits, else None."""
        self.seen_s: float | None = None
        self._calls: set[Any] = set()
        self._refused = ""

    @property
    def state(self) -> WorkerState:
        if self.described is None:
            return WorkerState.STARTING if self.seen_s is None else WorkerState.LOST
        return WorkerState.DRAINING if self.draining else worker_state_from_proto(self.described.state)

    @property
    def pid(self) -> int:
        return self.described.pid if self.described is not None else 0

    @property
    def exact(self) -> bool:
        return self.described is not None and self.described.exact

    async def keep(self) -> None:
        """Probes until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            suspicions = self._suspicions
            try:
                fits = self._accept(await self._describe())
            except grpc.aio.AioRpcError as error:
                end_if_cancelled()
                reason = error.details() or error.code().name
                self._lost(reason)
                if error.code() in _REFUSALS:
                    self._refuse(reason)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
                continue
            if not fits:
                await asyncio.sleep(LONGEST_RETRY_S)
                continue
            retry_s = FIRST_RETRY_S
            if self.suspected and suspicions == self._suspicions:
                self.suspected = False
                self._on_change()
            self._probe.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if self.suspected else PROBE_INTERVAL_S):
                    await self._probe.wait()

    def suspect(self) -> None:
        """A call failed: nothing new is granted to this worker until it answers again."""
        self.suspected = True
        self._suspicions += 1
        self._probe.set()

    @contextlib.contextmanager
    def tracked(self, call: Any) -> Any:
        """Counts a call as running and cuts it when the worker is found lost; always cancelled at the end."""
        self._calls.add(call)
        self.running += 1
        try:
            yield call
        finally:
            self._calls.discard(call)
            self.running -= 1
            call.cancel()

    async def drain(self, grace_s: float) -> int:
        """Takes the worker out of service; returns unfinished work after ``grace_s``."""
        self.draining = True
        self._on_change()
        response = await self._ask(
            self._worker.Drain(worker_pb2.DrainRequest(grace_s=grace_s), timeout=grace_s + PROBE_TIMEOUT_S)
        )
        return int(response.unfinished)

    async def set_testing(self, request: worker_pb2.SetTestingRequest) -> None:
        await self._ask(self._worker.SetTesting(request, timeout=PROBE_TIMEOUT_S))

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            raise PacelineError(
                failure.kind, f"worker {self.id}: {failure.message}", field=failure.field
            ) from None
        finally:
            call.cancel()

    async def _describe(self) -> worker_pb2.DescribeResponse:
        request = worker_pb2.DescribeRequest(protocol=PROTOCOL_VERSION)
        call = self._worker.Describe(request, timeout=PROBE_TIMEOUT_S)
        try:
            answer: worker_pb2.DescribeResponse = await call
            return answer
        finally:
            call.cancel()

    def _accept(self, seen: worker_pb2.DescribeResponse) -> bool:
        reason = None
        if worker_role_from_proto(seen.role) is not self.role:
            reason = f"role: want {self.role}"
        elif seen.protocol != PROTOCOL_VERSION:
            reason = f"protocol: speaks {seen.protocol}, want {PROTOCOL_VERSION}"
        elif self._expected is not None:
            reason = self._expected.mismatch(seen)
        if reason is not None:
            self._refuse(reason)
            self._lost(reason)
            return False
        before, self._refused = self.described, ""
        if before is not None and before.worker_incarnation != seen.worker_incarnation:
            # Calls of the process before ended with its connection; those of this one must go on.
            _log.warning("worker_restarted", worker=self.id)
            before = None
        if before is None:
            self.draining = False
            _log.info("worker_connected", worker=self.id, address=self.address, device=seen.device)
        self.described, self.seen_s = seen, time.monotonic()
        if before is None or before.state != seen.state:
            self._on_change()
        return True

    def _refuse(self, reason: str) -> None:
        if reason != self._refused:
            _log.error("worker_refused", worker=self.id, address=self.address, reason=reason)
        self._refused = reason

    def _lost(self, reason: str) -> None:
        if self.described is None:
            return
        _log.warning("worker_lost", worker=self.id, reason=reason, calls=len(self._calls))
        self.described = None
        for call in tuple(self._calls):
            call.cancel()
        self._on_change()


class Fleet:
    """All configured workers. ``changed`` is set when one came, went or drains; its reader clears it."""

    def __init__(self, verifiers: dict[str, str], drafters: dict[str, str], expected: Expected) -> None:
        self.changed = asyncio.Event()
        self.any_ready = asyncio.Event()
        self._expected = expected
        self.links = {
            worker_id: WorkerLink(worker_id, role, address, wanted, self._on_change)
            for role, addresses, wanted in (
                (WorkerRole.VERIFIER, verifiers, expected),
                (WorkerRole.DRAFTER, drafters, None),
            )
            for worker_id, address in addresses.items()
        }

    @property
    def verifiers(self) -> list[WorkerLink]:
        return [link for link in self.links.values() if link.role is WorkerRole.VERIFIER]

    @property
    def ready(self) -> list[WorkerLink]:
        """Verifiers in service."""
        return [link for link in self.verifiers if link.state is WorkerState.READY]

    @property
    def grantable(self) -> list[WorkerLink]:
        """Verifiers in service that did not just fail a call."""
        return [link for link in self.ready if not link.suspected]

    def _on_change(self) -> None:
        self.changed.set()
        if self.ready:
            self.any_ready.set()
        else:
            self.any_ready.clear()

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence that every known verifier takes."""
        limits = [
            link.described.max_context_tokens
            for link in self.verifiers
            if link.described is not None and link.described.max_context_tokens
        ]
        return min([self._expected.files.max_context_tokens, *limits])

    @property
    def max_sequences(self) -> int:
        return max((sequences(link) for link in self.ready), default=1)

    @property
    def max_kv_tokens(self) -> int:
        return max((kv_tokens(link) for link in self.ready), default=UNLIMITED_TOKENS)

    def link(self, worker_id: str) -> WorkerLink:
        """Raises PacelineError NOT_FOUND for an id that is not configured."""
        link = self.links.get(worker_id)
        if link is None:
            known = ", ".join(sorted(self.links)) or "none"
            raise PacelineError(ErrorKind.NOT_FOUND, f"no worker {worker_id!r} (known: {known})", field="id")
        return link

    async def keep(self) -> None:
        """Keeps every link until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links.values():
                tasks.create_task(link.keep())

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links.values()))


def sequences(link: WorkerLink) -> int:
    """Sequences the worker holds at once; at least 1."""
    return max(1, link.described.max_sequences) if link.described is not None else 0


def kv_tokens(link: WorkerLink) -> int:
    """KV cache of the worker in tokens, unlimited where it does not say."""
    if link.described is None:
        return 0
    return link.described.kv_cache_tokens or UNLIMITED_TOKENS
