"""Whatever a drafter does, the output is the target's own; and each fault is shown to have happened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.v1 import common_pb2, drafter_pb2, worker_pb2

COUNT = 200


async def test_a_good_drafter_speeds_up_and_changes_nothing(
    kit: Any, start_drafter: Any, start_verifier: Any
) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address])
    answer = await verifier.ask()
    assert answer.tokens == kit.chain(COUNT)
    receipt = answer.finished.receipt
    kit.check_receipt(receipt)
    assert receipt.accepted_tokens == receipt.verified_tokens > COUNT // 2
    assert receipt.rounds + receipt.accepted_tokens == COUNT
    assert [(d.id, d.kind) for d in receipt.drafters] == [("d0", "null")]
    assert receipt.reasons["default"] > 0
    assert drafter.seen["open"] == 1
    await kit.until(lambda: drafter.seen["close"] == 1)
    verifier.check_idle()


async def test_drafting_off_asks_nothing(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address])
    answer = await verifier.ask(speculation=common_pb2.SpeculationOptions(enabled=False))
    assert answer.tokens == kit.chain(COUNT)
    assert dict(answer.finished.receipt.reasons) == {"off": COUNT}
    assert not drafter.seen


@pytest.mark.parametrize("k", [1, 3, 16])
async def test_fixed_draft_length(kit: Any, start_drafter: Any, start_verifier: Any, k: int) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address], speculation={"wait": "always", "k": k})
    answer = await verifier.ask()
    assert answer.tokens == kit.chain(COUNT)
    receipt = answer.finished.receipt
    kit.check_receipt(receipt)
    lengths = {length for length in receipt.draft_length_histogram if length}
    assert max(lengths) == k
    # A null engine makes many rounds before the drafter has opened the session.
    drafting = receipt.rounds - receipt.reasons["opening"]
    assert receipt.draft_length_histogram[k] >= drafting // 2


async def test_a_long_prompt_is_opened_in_chunks(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address])
    prompt = [i % 4000 for i in range(33_000)]
    answer = await verifier.ask(prompt=prompt, max_tokens=8)
    assert answer.tokens == kit.chain(8, prompt=prompt)
    assert drafter.seen["longest_chunk"] == 16_384


async def test_an_adversary_costs_time_only(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    class Adversary(kit.ScriptedDrafter):
        turn = 0

        async def answer(self, commit: Any) -> list[Any]:
            good = self.good(commit)
            bad = drafter_pb2.SessionProposal()
            bad.CopyFrom(good)
            self.turn += 1
            name = FAULTS[self.turn % len(FAULTS)]
            self.seen[name] += 1
            match name:
                case "wrong_base":
                    bad.base_length += 3
                case "huge_base":
                    bad.base_length = 0xFFFFFFFF
                case "wrong_hash":
                    bad.prefix_hash ^= 1
                case "duplicate":
                    return [good, good]
                case "over_long":
                    bad.token_ids.extend([1] * 5000)
                case "out_of_vocabulary":
                    bad.token_ids[0] = 0xFFFFFFFF
                case "unknown_session":
                    bad.session_id ^= 1
                    return [bad, good]
                case "wrong_generation":
                    bad.session_gen += 1
                    return [bad, good]
                case "wrong_tokens":
                    for index in range(len(bad.token_ids)):
                        bad.token_ids[index] = 1
                case "empty":
                    del bad.token_ids[:]
                case "diverged":
                    bad.base_length, bad.prefix_hash = 0, 0x811C9DC5
                case "session_unknown_to_drafter":
                    bad.status = drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION
                case "prefix_mismatch":
                    bad.status = drafter_pb2.PROPOSAL_STATUS_PREFIX_MISMATCH
            return [bad]

    faults = (
        "wrong_base",
        "huge_base",
        "wrong_hash",
        "duplicate",
        "over_long",
        "out_of_vocabulary",
        "unknown_session",
        "wrong_generation",
        "wrong_tokens",
        "empty",
        "diverged",
        "session_unknown_to_drafter",
        "prefix_mismatch",
    )
    FAULTS = faults  # noqa: N806
    drafter = await start_drafter(Adversary())
    verifier = await start_verifier([drafter.address])
    answers = await asyncio.gather(
        *(verifier.ask(request_id=f"r{i}", seed=i, max_tokens=400) for i in range(3))
    )
    for seed, answer in enumerate(answers):
        assert answer.tokens == kit.chain(400, seed=seed)
        kit.check_receipt(answer.finished.receipt)
    assert all(drafter.seen[name] for name in faults)
    stale = verifier.stale()
    for reason in (
        "wrong_base",
        "duplicate",
        "over_long",
        "out_of_vocabulary",
        "unknown_session",
        "wrong_generation",
        "diverged",
        "session_unknown_to_drafter",
        "prefix_mismatch",
    ):
        assert stale.get(reason), reason
    assert drafter.seen["open"] > 3, "sessions are opened again"
    assert sum(a.finished.receipt.accepted_tokens for a in answers) > 0
    verifier.check_idle()


async def test_late_proposals_are_trimmed(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address], speculation={"wait": "never", "k": 16})
    answer = await verifier.ask(max_tokens=2000)
    assert answer.tokens == kit.chain(2000)
    receipt = answer.finished.receipt
    kit.check_receipt(receipt)
    assert receipt.trimmed_tokens > 0
    assert receipt.wait_ms == 0


async def test_a_frozen_drafter_is_lost_and_rounds_go_on(
    kit: Any, start_drafter: Any, start_verifier: Any
) -> None:
    class Frozen(kit.ScriptedDrafter):
        async def answer(self, commit: Any) -> list[Any]:
            if self.seen["frames"] > 3:
                self.seen["frozen"] += 1
                await asyncio.Event().wait()
            return [self.good(commit)]

    drafter = await start_drafter(Frozen())
    verifier = await start_verifier([drafter.address])
    answer = await verifier.ask(max_tokens=300)
    assert answer.tokens == kit.chain(300)
    receipt = answer.finished.receipt
    kit.check_receipt(receipt)
    assert drafter.seen["frozen"] >= 1
    assert receipt.reasons["no_drafter"] > 0
    assert 0 < receipt.accepted_tokens < 100


async def test_a_drafter_that_dies_midway_and_returns(
    kit: Any, start_drafter: Any, start_verifier: Any
) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address])
    link = verifier.process.drafting.links[0]
    call = verifier.stub.Generate(kit.request(max_tokens=3000))
    tokens: list[int] = []
    finished = revived = None
    lost_at = 0
    async for response in call:
        tokens += response.tokens.token_ids
        finished = response.finished if response.HasField("finished") else finished
        if len(tokens) > 500 and not lost_at:
            verifier.runner.gate.clear()
            assert drafter.seen["frames"] > 0
            await drafter.server.stop(0)
            await kit.until(lambda: not link.ready)
            verifier.runner.gate.set()
            lost_at = len(tokens)
        if lost_at and len(tokens) > lost_at + 500 and revived is None:
            verifier.runner.gate.clear()
            revived = await start_drafter(kit.ScriptedDrafter(), int(drafter.address.rsplit(":", 1)[1]))
            await kit.until(lambda: link.ready)
            verifier.runner.gate.set()
    assert tokens == kit.chain(3000)
    assert finished is not None
    kit.check_receipt(finished.receipt)
    assert finished.receipt.reasons["no_drafter"] > 0
    assert revived is not None
    assert revived.seen["open"] == 1
    assert revived.seen["frames"] > 0


async def test_failover_to_another_drafter(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    drafters = [await start_drafter(kit.ScriptedDrafter()) for _ in range(2)]
    verifier = await start_verifier([d.address for d in drafters])
    call = verifier.stub.Generate(kit.request(max_tokens=1500))
    tokens: list[int] = []
    killed = False
    async for response in call:
        tokens += response.tokens.token_ids
        finished = response.finished
        if len(tokens) > 100 and not killed:
            used = next(d for d in drafters if d.seen["frames"])
            await used.server.stop(0)
            killed = True
    assert tokens == kit.chain(1500)
    assert [d.id for d in finished.receipt.drafters] in (["d0", "d1"], ["d1", "d0"])
    assert all(d.seen["frames"] for d in drafters)
    kit.check_receipt(finished.receipt)


async def test_least_loaded_and_named_drafters(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    drafters = [await start_drafter(kit.ScriptedDrafter()) for _ in range(2)]
    verifier = await start_verifier([d.address for d in drafters])
    await asyncio.gather(*(verifier.ask(request_id=f"r{i}", max_tokens=50) for i in range(4)))
    assert [d.seen["open"] for d in drafters] == [2, 2]
    named = common_pb2.SpeculationOptions(drafter="d1")
    answer = await verifier.ask(speculation=named)
    assert [d.id for d in answer.finished.receipt.drafters] == ["d1"]
    by_kind = await verifier.ask(speculation=common_pb2.SpeculationOptions(drafter="null"))
    assert by_kind.finished.receipt.accepted_tokens > 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer_fingerprint": "0" * 64}, "another tokenizer"),
        ({"vocab_size": 32_000}, "vocabulary of 32000, want 5000"),
        ({"protocol": 99}, "protocol 99"),
    ],
)
async def test_a_mismatch_is_refused_with_the_reason(
    kit: Any, start_drafter: Any, start_verifier: Any, fields: dict[str, Any], reason: str
) -> None:
    drafter = kit.ScriptedDrafter()
    drafter.describe.MergeFrom(worker_pb2.DescribeResponse(**fields))
    await start_drafter(drafter)
    verifier = await start_verifier([drafter.address], ready=0)
    link = verifier.process.drafting.links[0]
    await kit.until(lambda: link.refusal is not None)
    assert reason in link.refusal
    answer = await verifier.ask(max_tokens=20)
    assert answer.tokens == kit.chain(20)
    assert answer.finished.receipt.reasons["no_drafter"] == 18  # not the first and the last
    assert not drafter.seen


async def test_a_padded_vocabulary_is_fine(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    drafter = kit.ScriptedDrafter()
    drafter.describe.tokenizer_fingerprint = "f" * 64
    drafter.describe.vocab_size = 5120
    await start_drafter(drafter)
    verifier = await start_verifier([drafter.address])
    assert (await verifier.ask()).finished.receipt.accepted_tokens > 0


async def test_a_drafter_with_a_shorter_context_stops_being_asked(
    kit: Any, start_drafter: Any, start_verifier: Any
) -> None:
    drafter = kit.ScriptedDrafter()
    drafter.describe.max_context_tokens = 100
    await start_drafter(drafter)
    verifier = await start_verifier([drafter.address])
    answer = await verifier.ask()
    assert answer.tokens == kit.chain(COUNT)
    assert answer.finished.receipt.reasons["drafter_context"] > 0
    assert answer.finished.receipt.accepted_tokens > 0


async def test_added_round_trip_is_seen_as_network(kit: Any, start_drafter: Any, start_verifier: Any) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address])
    await verifier.worker.SetTesting(worker_pb2.SetTestingRequest(rtt_ms=20))
    answer = await verifier.ask(max_tokens=30)
    assert answer.tokens == kit.chain(30)
    rounds = [r for r in answer.finished.rounds if r.k]
    assert rounds
    assert answer.finished.terms.network >= 0.02 * len(rounds)
    assert answer.finished.receipt.wait_ms >= 20 * len(rounds)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
async def test_synthetic_acceptance(
    kit: Any, start_drafter: Any, start_verifier: Any, acceptance: float
) -> None:
    drafter = await start_drafter(kit.ScriptedDrafter())
    verifier = await start_verifier([drafter.address])
    await verifier.worker.SetTesting(worker_pb2.SetTestingRequest(acceptance=acceptance))
    answer = await verifier.ask(max_tokens=1000)
    # The drafter is right, so that forced rejections commit the same tokens.
    assert answer.tokens == kit.chain(1000)
    receipt = answer.finished.receipt
    assert receipt.synthetic
    first = receipt.accepted_by_position[0] / max(1, receipt.rounds - receipt.undrafted_rounds)
    assert abs(first - acceptance) < 0.1
    kit.check_receipt(receipt)
