"""The admission queue over Redis: Lua scripts decide, this class calls them.

Redis holds admission state only. The gateway that owns a request holds the request itself, so that nothing
is lost with Redis: leases are written again by `AdmissionQueue.extend`, waiting requests by their owners.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from importlib import resources
from typing import Any, cast

import redis.asyncio as redis
from redis.commands.core import AsyncScript

from paceline.core.errors import ErrorKind, PacelineError
from paceline.gateway.queue.server import COMMAND_TIMEOUT_S, check, server_errors
from paceline.gateway.queue.values import Grant, Lease, QueueDepth, Ticket, WorkerCredit

_SCRIPTS = ("reserve", "enqueue", "grant", "extend", "finish", "nack", "reap", "depth")
HEARTBEAT_EXPIRY_S = 5.0
MIN_RETRY_S = 1.0
RATE_WINDOW_S = 10.0


class AdmissionQueue:
    """One gateway's view of the queue of one model.

    Args:
        client: with short socket timeouts; blocking reads use a connection of their own from its pool.
        owner: this gateway's id; grants for its requests come to its own list.
        max_requests: waiting requests, reserved slots included, before new ones are refused.
        max_tokens: waiting KV tokens before new ones are refused.
        lease_s: life of a lease that is not extended.

    Every method raises PacelineError UNAVAILABLE when Redis fails.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        model: str,
        owner: str,
        max_requests: int,
        max_tokens: int,
        lease_s: float,
    ) -> None:
        self.owner = owner
        self._client = client
        self._prefix = f"paceline:{{{model}}}"
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._lease_ms = int(lease_s * 1000)
        folder = resources.files("paceline.gateway.queue") / "lua"
        common = (folder / "common.lua").read_text(encoding="utf-8")
        self._scripts: dict[str, AsyncScript] = {
            name: client.register_script(common + (folder / f"{name}.lua").read_text(encoding="utf-8"))
            for name in _SCRIPTS
        }
        self._grants: deque[tuple[float, int]] = deque()
        self.now_ms = 0
        """Tests set the clock of the scripts; 0 is Redis' own."""

    async def check_server(self) -> None:
        """Raises ConfigError unless the server can hold the queue (`server.check`)."""
        await check(self._client)

    async def reserve(self, request_id: str, sequences: int, timeout_s: float = 10) -> None:
        """Takes a slot before the prompt is tokenized.

        Raises:
            PacelineError: OVERLOADED if the queue is full, ALREADY_EXISTS for an id in use.
        """
        status, depth = await self._run(
            "reserve", request_id, self.owner, sequences, int(timeout_s * 1000), self._max_requests
        )
        self._refuse(status, request_id, int(depth), f"{self._max_requests} requests")

    async def enqueue(self, ticket: Ticket) -> None:
        """Turns the reservation into a place in line.

        Raises:
            PacelineError: OVERLOADED if the waiting tokens would pass their limit, ALREADY_EXISTS.
        """
        status, _ = await self._run(
            "enqueue",
            ticket.request_id,
            self.owner,
            ticket.slo_class,
            ticket.priority,
            ticket.tenant,
            ticket.sequences,
            ticket.kv_tokens,
            int(ticket.deadline_s * 1000),
            self._max_tokens,
        )
        self._refuse(status, ticket.request_id, 1, f"{self._max_tokens} tokens")

    async def grant(self, workers: Sequence[WorkerCredit]) -> int:
        """Binds as many waiting requests to verifiers as these have credit for; returns how many."""
        rows = [[w.verifier_id, w.sequences, w.kv_tokens, w.weight] for w in workers]
        granted = int(await self._run("grant", self._lease_ms, json.dumps(rows)))
        if granted:
            self._grants.append((time.monotonic(), granted))
        return granted

    async def next_grants(self, timeout_s: float) -> list[Grant]:
        """This owner's grants, waiting up to ``timeout_s`` for the first."""
        key = f"{self._prefix}:grants:{self.owner}"
        async with server_errors(timeout_s + COMMAND_TIMEOUT_S):
            first = await cast("Awaitable[Any]", self._client.blpop([key], timeout=timeout_s))
            if first is None:
                return []
            more = await cast("Awaitable[Any]", self._client.lpop(key, 1000))
        return [Grant(*json.loads(row)) for row in (first[1], *(more or ()))]

    async def heartbeat(self) -> None:
        """Says that this owner lives; without it, its requests are skipped after 5 s."""
        async with server_errors():
            await self._client.set(
                f"{self._prefix}:owner:{self.owner}", "1", px=int(HEARTBEAT_EXPIRY_S * 1000)
            )

    async def extend(self, leases: Sequence[Lease]) -> None:
        """Renews leases, writing those anew that Redis has lost."""
        if not leases:
            return
        rows = [
            [x.request_id, x.verifier_id, x.epoch, x.slo_class, x.tenant, x.sequences, x.kv_tokens]
            for x in leases
        ]
        await self._run("extend", self._lease_ms, self.owner, json.dumps(rows))

    async def ack(self, request_id: str, *, served_tokens: int) -> None:
        """Ends a lease; the tenant is charged what was served instead of the estimate."""
        await self._run("finish", request_id, self.owner, served_tokens)

    async def nack(self, request_id: str, *, avoid: str = "") -> bool:
        """Gives a granted request back, to the head of its line; False if Redis does not know it."""
        return bool(await self._run("nack", request_id, avoid))

    async def cancel(self, request_id: str) -> bool:
        """Removes a request of this owner in whatever state; False if there is none."""
        return bool(await self._run("finish", request_id, self.owner, 0))

    async def missing(self, request_ids: Sequence[str]) -> list[str]:
        """Those that the server does not know (any more)."""
        async with server_errors(), self._client.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.exists(f"{self._prefix}:req:{request_id}")
            known = await pipe.execute()
        return [i for i, found in zip(request_ids, known, strict=True) if not found]

    async def reap(self) -> int:
        """Forgets expired leases and reservations; returns how many."""
        return int(await self._run("reap"))

    async def depth(self) -> QueueDepth:
        waiting, tokens, reserved, leases, *classes = await self._run("depth")
        names = [name.decode() for name in classes[0::2]]
        by_class = dict(zip(names, (int(n) for n in classes[1::2]), strict=True))
        return QueueDepth(int(waiting), int(tokens), int(reserved), int(leases), by_class)

    async def _run(self, name: str, *arguments: str | int | float) -> Any:
        async with server_errors():
            return await self._scripts[name](keys=[self._prefix], args=[self.now_ms, *arguments])

    def _refuse(self, status: bytes, request_id: str, depth: int, limit: str) -> None:
        if status == b"exists":
            raise PacelineError(
                ErrorKind.ALREADY_EXISTS, f"request_id: {request_id} is in use", field="request_id"
            )
        if status == b"full":
            raise PacelineError(
                ErrorKind.OVERLOADED,
                f"the queue is full (limit {limit})",
                retry_after_s=self._expected_wait_s(depth),
            )

    def _expected_wait_s(self, depth: int) -> float:
        """Time until ``depth`` requests are granted at this gateway's recent rate, from 1 to 60 s."""
        horizon = time.monotonic() - RATE_WINDOW_S
        while self._grants and self._grants[0][0] < horizon:
            self._grants.popleft()
        rate = sum(n for _, n in self._grants) / RATE_WINDOW_S
        return min(60.0, max(MIN_RETRY_S, depth / rate)) if rate else MIN_RETRY_S
