"""Random interleavings on the real server against a pure model of the queue's rules."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.gateway.queue import AdmissionQueue, EmbeddedRedis, Lease, Ticket, WorkerCredit

WORKERS = (WorkerCredit("v0", 3, 300), WorkerCredit("v1", 2, 500))
MAX_REQUESTS, MAX_TOKENS, LEASE_S = 6, 900, 10.0
CLASSES = {"gold": 0, "plain": 1}

IDS = st.sampled_from([f"r{i}" for i in range(8)])
OPERATIONS = st.one_of(
    st.tuples(
        st.just("enqueue"),
        IDS,
        st.sampled_from(sorted(CLASSES)),
        st.sampled_from("ab"),
        st.integers(1, 2),
        st.sampled_from([50, 100, 200]),
        st.integers(5, 40),
    ),
    st.tuples(st.just("grant")),
    st.tuples(st.just("ack"), IDS, st.integers(0, 200)),
    st.tuples(st.just("nack"), IDS),
    st.tuples(st.just("cancel"), IDS),
    st.tuples(st.just("extend")),
    st.tuples(st.just("advance"), st.integers(1, 12)),
    st.tuples(st.just("reap")),
)


@dataclass
class Model:
    """The rules of the design, in plain Python; times in seconds."""

    now: int = 1000
    waiting: dict[str, dict[str, Any]] = field(default_factory=dict)
    leased: dict[str, dict[str, Any]] = field(default_factory=dict)
    served: dict[tuple[str, str], float] = field(default_factory=dict)
    arrivals: int = 0

    def active(self, slo_class: str) -> set[str]:
        return {r["tenant"] for r in self.waiting.values() if r["class"] == slo_class}

    def line_up(self, request_id: str, request: dict[str, Any], deadline: float) -> None:
        slo_class, tenant = request["class"], request["tenant"]
        if tenant not in self.active(slo_class):
            others = [self.served[slo_class, t] for t in self.active(slo_class)]
            own = self.served.get((slo_class, tenant), 0)
            self.served[slo_class, tenant] = max(own, min(others)) if others else own
        self.waiting[request_id] = {**request, "deadline": deadline}

    def enqueue(self, request_id: str, request: dict[str, Any], wait: int) -> bool:
        if request_id in self.waiting or request_id in self.leased or len(self.waiting) >= MAX_REQUESTS:
            return False
        tokens = sum(r["kv"] for r in self.waiting.values())
        if tokens and tokens + request["kv"] > MAX_TOKENS:
            return False
        self.line_up(request_id, {**request, "epoch": 0}, self.now + wait)
        return True

    def free(self) -> dict[str, list[int]]:
        free = {w.verifier_id: [w.sequences, w.kv_tokens] for w in WORKERS}
        for r in self.leased.values():
            if r["expiry"] > self.now:
                free[r["verifier"]][0] -= r["sequences"]
                free[r["verifier"]][1] -= r["kv"]
        return free

    def grant(self) -> list[tuple[str, str, int]]:
        told: list[tuple[str, str, int]] = []
        expired = [i for i, r in self.waiting.items() if 0 < r["deadline"] <= self.now]
        for request_id in expired:
            told.append((request_id, "", 0))
            del self.waiting[request_id]
        while self.waiting:
            slo_class = min({r["class"] for r in self.waiting.values()}, key=lambda c: (CLASSES[c], c))
            tenant = min(self.active(slo_class), key=lambda t: (self.served[slo_class, t], t))
            line = [
                (r["deadline"], i)
                for i, r in self.waiting.items()
                if (r["class"], r["tenant"]) == (slo_class, tenant)
            ]
            request_id = min(line)[1]
            r = self.waiting[request_id]
            free = self.free()
            fitting = [
                w
                for w in WORKERS
                if free[w.verifier_id][0] >= r["sequences"] and free[w.verifier_id][1] >= r["kv"]
            ]
            if not fitting:
                break
            worker = max(fitting, key=lambda w: free[w.verifier_id][0] / w.sequences)
            del self.waiting[request_id]
            self.served[slo_class, tenant] += r["kv"]
            epoch = r["epoch"] + 1
            self.leased[request_id] = {
                **r,
                "epoch": epoch,
                "verifier": worker.verifier_id,
                "expiry": self.now + LEASE_S,
            }
            told.append((request_id, worker.verifier_id, epoch))
        return told


async def play(operations: list[tuple[Any, ...]], client: redis.Redis) -> None:
    await client.flushall()
    queue = AdmissionQueue(
        client, model="m", owner="g", max_requests=MAX_REQUESTS, max_tokens=MAX_TOKENS, lease_s=LEASE_S
    )
    await queue.heartbeat()
    model = Model()
    epochs: set[tuple[str, int, int]] = set()
    lives = 0
    for operation in operations:
        queue.now_ms = model.now * 1000
        name, *arguments = operation
        if name == "enqueue":
            request_id, slo_class, tenant, sequences, kv, wait = arguments
            request = {"class": slo_class, "tenant": tenant, "sequences": sequences, "kv": kv}
            expected = model.enqueue(request_id, request, wait)
            try:
                await queue.reserve(request_id, sequences)
                await queue.enqueue(
                    Ticket(request_id, slo_class, CLASSES[slo_class], tenant, sequences, kv, wait)
                )
                assert expected
                lives += 1
            except PacelineError:
                assert not expected
        elif name == "grant":
            expected_grants = model.grant()
            await queue.grant(WORKERS)
            got = [
                (g.request_id, g.verifier_id, g.epoch)
                for g in (await queue.next_grants(1) if expected_grants else [])
            ]
            # Waits that ended come first, in no order among themselves.
            ended = sum(1 for g in expected_grants if not g[1])
            assert sorted(got[:ended]) == sorted(expected_grants[:ended])
            assert got[ended:] == expected_grants[ended:]
            for request_id, verifier, epoch in got[ended:]:
                assert verifier
                assert (request_id, lives, epoch) not in epochs
                epochs.add((request_id, lives, epoch))
            for sequences, kv in model.free().values():
                assert sequences >= 0
                assert kv >= 0
        elif name == "ack":
            request_id, served = arguments
            if request_id in model.leased:
                r = model.leased.pop(request_id)
                model.served[r["class"], r["tenant"]] += served - r["kv"]
                await queue.ack(request_id, served_tokens=served)
        elif name == "nack":
            known = arguments[0] in model.leased
            if known:
                r = model.leased.pop(arguments[0])
                model.served[r["class"], r["tenant"]] -= r["kv"]
                model.line_up(arguments[0], r, 0)
            assert await queue.nack(arguments[0]) is known
        elif name == "cancel":
            known = arguments[0] in model.leased or arguments[0] in model.waiting
            if arguments[0] in model.leased:
                r = model.leased.pop(arguments[0])
                model.served[r["class"], r["tenant"]] -= r["kv"]
            model.waiting.pop(arguments[0], None)
            assert await queue.cancel(arguments[0]) is known
        elif name == "extend":
            leases = [
                Lease(i, r["verifier"], r["epoch"], r["class"], r["tenant"], r["sequences"], r["kv"])
                for i, r in model.leased.items()
            ]
            await queue.extend(leases)
            for r in model.leased.values():
                r["expiry"] = model.now + LEASE_S
        elif name == "advance":
            model.now += arguments[0]
        elif name == "reap":
            dead = [i for i, r in model.leased.items() if r["expiry"] <= model.now]
            for request_id in dead:
                del model.leased[request_id]
            assert await queue.reap() == len(dead)
        queue.now_ms = model.now * 1000
        depth = await queue.depth()
        assert depth.waiting_requests == len(model.waiting)
        assert depth.waiting_tokens == sum(r["kv"] for r in model.waiting.values())
        assert depth.leases == sum(1 for r in model.leased.values() if r["expiry"] > model.now)
    for request_id in [*model.waiting, *model.leased]:
        await queue.cancel(request_id)
    left = {key.decode().split(":", 2)[2] for key in await client.keys("*")}
    assert left <= {"owner:g", "service:gold", "service:plain"}


def test_queue_follows_the_model() -> None:
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder))
        loop.run_until_complete(server.start())
        client = redis.from_url(server.url)

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(OPERATIONS, max_size=40))
        def run(operations: list[tuple[Any, ...]]) -> None:
            loop.run_until_complete(play(operations, client))

        try:
            run()
        finally:
            loop.run_until_complete(client.aclose())
            loop.run_until_complete(server.stop())
            loop.close()
