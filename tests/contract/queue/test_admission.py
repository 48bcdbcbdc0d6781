"""Each operation of the admission queue on real servers."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from paceline.core.errors import ConfigError, ErrorKind, PacelineError
from paceline.gateway.queue import AdmissionQueue, Grant, Lease, Ticket, WorkerCredit


def ticket(request_id: str, **changes: object) -> Ticket:
    fields = {
        "slo_class": "default",
        "priority": 0,
        "tenant": "t",
        "sequences": 1,
        "kv_tokens": 100,
        "deadline_s": 30.0,
    }
    return Ticket(request_id, **{**fields, **changes})  # type: ignore[arg-type]


def lease(request_id: str, epoch: int = 1) -> Lease:
    return Lease(request_id, "v0", epoch, "default", "t", 1, 100)


V0 = WorkerCredit("v0", 8, 10_000)


async def test_a_request_goes_through(queue: AdmissionQueue) -> None:
    await queue.reserve("a", 1)
    assert (await queue.depth()).reserved == 1
    await queue.enqueue(ticket("a"))
    depth = await queue.depth()
    assert (depth.reserved, depth.waiting_requests, depth.waiting_tokens) == (0, 1, 100)
    assert depth.waiting_by_class == {"default": 1}
    assert await queue.grant([V0]) == 1
    assert await queue.next_grants(1) == [Grant("a", "v0", 1)]
    assert (await queue.depth()).leases == 1
    await queue.ack("a", served_tokens=40)
    depth = await queue.depth()
    assert (depth.waiting_requests, depth.leases) == (0, 0)


async def test_slots_are_limited_before_tokenizing(queue: AdmissionQueue) -> None:
    for i in range(4):
        await queue.reserve(f"r{i}", 1)
    with pytest.raises(PacelineError) as caught:
        await queue.reserve("more", 1)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    assert await queue.cancel("r0")
    await queue.reserve("more", 1)


async def test_waiting_tokens_are_limited(queue: AdmissionQueue) -> None:
    await queue.enqueue(ticket("a", kv_tokens=900))
    with pytest.raises(PacelineError) as caught:
        await queue.enqueue(ticket("b", kv_tokens=200))
    assert caught.value.kind is ErrorKind.OVERLOADED
    await queue.enqueue(ticket("b", kv_tokens=100))


async def test_an_id_in_use_is_refused_in_every_state(queue: AdmissionQueue) -> None:
    await queue.reserve("a", 1)
    for _ in range(3):
        with pytest.raises(PacelineError) as caught:
            await queue.reserve("a", 1)
        assert caught.value.kind is ErrorKind.ALREADY_EXISTS
        if (await queue.depth()).reserved:
            await queue.enqueue(ticket("a"))
        else:
            await queue.grant([V0])
    await queue.ack("a", served_tokens=1)
    await queue.reserve("a", 1)


async def test_class_priority_then_deadline(queue: AdmissionQueue) -> None:
    await queue.enqueue(ticket("late", deadline_s=50))
    await queue.enqueue(ticket("soon", deadline_s=10))
    await queue.enqueue(ticket("first", slo_class="gold", priority=-1, deadline_s=60))
    assert await queue.grant([V0]) == 3
    assert [g.request_id for g in await queue.next_grants(1)] == ["first", "soon", "late"]


async def test_tenants_take_turns_by_tokens_served(queue: AdmissionQueue) -> None:
    for i in range(3):
        await queue.enqueue(ticket(f"a{i}", tenant="a", deadline_s=10))
    await queue.enqueue(ticket("b0", tenant="b", deadline_s=60))
    await queue.grant([WorkerCredit("v0", 2, 10_000)])
    assert [g.request_id for g in await queue.next_grants(1)] == ["a0", "b0"]
    # Tenant a used less than its estimate, so it is next.
    await queue.ack("a0", served_tokens=10)
    await queue.ack("b0", served_tokens=100)
    await queue.enqueue(ticket("b1", tenant="b", deadline_s=1))
    await queue.grant([WorkerCredit("v0", 1, 10_000)])
    assert [g.request_id for g in await queue.next_grants(1)] == ["a1"]


async def test_credit_is_what_live_leases_leave(queue: AdmissionQueue) -> None:
    small = WorkerCredit("v0", 2, 250)
    for name in ("a", "b", "c"):
        await queue.enqueue(ticket(name))
    assert await queue.grant([small]) == 2
    assert await queue.grant([small]) == 0
    await queue.ack("a", served_tokens=1)
    assert await queue.grant([small]) == 1


async def test_a_large_request_is_not_starved_by_small_ones(queue: AdmissionQueue) -> None:
    await queue.enqueue(ticket("busy", sequences=2, deadline_s=1))
    assert await queue.grant([WorkerCredit("v0", 3, 10_000)]) == 1
    await queue.enqueue(ticket("large", sequences=3, deadline_s=10))
    await queue.enqueue(ticket("small", sequences=1, deadline_s=20))
    assert await queue.grant([WorkerCredit("v0", 3, 10_000)]) == 0
    await queue.ack("busy", served_tokens=1)
    await queue.grant([WorkerCredit("v0", 3, 10_000)])
    assert [g.request_id for g in await queue.next_grants(1)] == ["busy", "large"]


async def test_load_spreads_by_weighted_free_capacity(queue: AdmissionQueue) -> None:
    for i in range(4):
        await queue.enqueue(ticket(f"r{i}"))
    workers = [WorkerCredit("slow", 4, 10_000, 1.0), WorkerCredit("fast", 4, 10_000, 3.0)]
    await queue.grant(workers)
    verifiers = [g.verifier_id for g in await queue.next_grants(1)]
    # 3x the weight: fast scores 3, 2.25, 1.5 before slow's 1 is best.
    assert verifiers == ["fast", "fast", "fast", "slow"]


async def test_a_wait_that_is_over_is_told(queue: AdmissionQueue) -> None:
    queue.now_ms = 1_000_000
    await queue.enqueue(ticket("a", deadline_s=5))
    await queue.enqueue(ticket("b", deadline_s=50))
    queue.now_ms += 5_001
    assert await queue.grant([]) == 0
    assert await queue.next_grants(1) == [Grant("a", "", 0)]
    assert (await queue.depth()).waiting_requests == 1


async def test_given_back_goes_first_and_elsewhere_under_a_new_epoch(queue: AdmissionQueue) -> None:
    workers = [V0, WorkerCredit("v1", 1, 10_000, 0.01)]
    await queue.enqueue(ticket("a"))
    await queue.grant(workers)
    await queue.next_grants(1)
    await queue.enqueue(ticket("b", deadline_s=1))
    assert await queue.nack("a", avoid="v0")
    await queue.grant(workers)
    assert await queue.next_grants(1) == [Grant("a", "v1", 2), Grant("b", "v0", 1)]
    assert not await queue.nack("unknown")


async def test_leases_expire_unless_extended(queue: AdmissionQueue) -> None:
    queue.now_ms = 1_000_000
    await queue.enqueue(ticket("a"))
    await queue.enqueue(ticket("b"))
    await queue.grant([V0])
    queue.now_ms += 9_000
    await queue.extend([lease("a")])
    queue.now_ms += 2_000
    assert (await queue.depth()).leases == 1
    assert await queue.reap() == 1
    assert await queue.cancel("a")
    assert not await queue.cancel("b")


async def test_extending_heals_an_emptied_server(queue: AdmissionQueue, client: redis.Redis) -> None:
    await queue.enqueue(ticket("a"))
    await queue.grant([V0])
    await client.flushall()
    await queue.heartbeat()
    await queue.extend([lease("a")])
    assert (await queue.depth()).leases == 1
    await queue.enqueue(ticket("b"))
    assert await queue.grant([WorkerCredit("v0", 1, 10_000)]) == 0, "the healed lease holds its credit"


async def test_a_stale_extend_does_not_revive_an_older_grant(queue: AdmissionQueue) -> None:
    queue.now_ms = 1_000_000
    await queue.enqueue(ticket("a"))
    await queue.grant([V0])
    await queue.nack("a")
    await queue.grant([V0])
    queue.now_ms += 9_000
    await queue.extend([lease("a", epoch=1)])
    queue.now_ms += 2_000
    assert (await queue.depth()).leases == 0


async def test_requests_of_a_dead_owner_are_skipped(queue: AdmissionQueue, client: redis.Redis) -> None:
    await queue.enqueue(ticket("a"))
    await client.delete("paceline:{m}:owner:g1")
    assert await queue.grant([V0]) == 0
    assert (await queue.depth()).waiting_requests == 0


async def test_nothing_is_left_but_the_fair_share(queue: AdmissionQueue, client: redis.Redis) -> None:
    for i, end in enumerate(("ack", "cancel", "cancel-waiting")):
        await queue.enqueue(ticket(f"r{i}"))
        if end != "cancel-waiting":
            await queue.grant([V0])
            await queue.next_grants(1)
        if end == "ack":
            await queue.ack(f"r{i}", served_tokens=5)
        else:
            assert await queue.cancel(f"r{i}")
    left = {key.decode() for key in await client.keys("*")}
    assert left == {"paceline:{m}:owner:g1", "paceline:{m}:service:default"}
    for key in left:
        assert await client.pttl(key) > 0


async def test_a_server_that_evicts_is_refused(queue: AdmissionQueue, client: redis.Redis) -> None:
    await client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="noeviction"):
        await queue.check_server()


async def test_a_lost_server_is_unavailable_not_a_crash(tmp_path: object) -> None:
    client = redis.from_url("unix:///nonexistent/redis.sock")
    queue = AdmissionQueue(client, model="m", owner="g", max_requests=1, max_tokens=1, lease_s=1)
    for call in (queue.heartbeat(), queue.reserve("a", 1), queue.next_grants(1), queue.check_server()):
        with pytest.raises(PacelineError) as caught:
            await call
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert caught.value.retry_after_s
    await client.aclose()


async def test_another_owner_cannot_end_a_request(queue: AdmissionQueue, client: redis.Redis) -> None:
    other = AdmissionQueue(client, model="m", owner="g2", max_requests=4, max_tokens=1000, lease_s=10)
    await queue.enqueue(ticket("a"))
    assert not await other.cancel("a")
    await queue.grant([V0])
    await other.ack("a", served_tokens=1)
    assert (await queue.depth()).leases == 1
    assert await queue.cancel("a")


async def test_missing_tells_what_the_server_lost(queue: AdmissionQueue, client: redis.Redis) -> None:
    await queue.enqueue(ticket("a"))
    assert await queue.missing(["a", "b"]) == ["b"]
    await client.flushall()
    assert await queue.missing(["a", "b"]) == ["a", "b"]


async def test_a_request_that_fits_no_worker_takes_a_whole_one(queue: AdmissionQueue) -> None:
    await queue.enqueue(ticket("huge", sequences=9, kv_tokens=900, deadline_s=1))
    await queue.enqueue(ticket("next", deadline_s=2))
    small = WorkerCredit("v0", 2, 500)
    assert await queue.grant([small]) == 1
    assert await queue.grant([small]) == 0
    await queue.ack("huge", served_tokens=1)
    assert await queue.grant([small]) == 1
    assert [g.request_id for g in await queue.next_grants(1)] == ["huge", "next"]
