"""Scheduling rules one at a time."""

from __future__ import annotations

import pytest

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.nullmodel import null_token
from paceline.core.types import SamplingParams
from paceline.engine.blocks import BlockManager, IntegrityError, chain_hash
from paceline.engine.null import NullRunner, TimedRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Sequence, StepPlan


def make(blocks: int = 64, *, sequences: int = 8, step: int = 64, cache: bool = True) -> Scheduler:
    runner = NullRunner(vocab_size=4000, max_context_tokens=512, kv_cache_tokens=blocks * 16)
    return Scheduler(runner, max_sequences=sequences, max_step_tokens=step, prefix_cache=cache)


def sequence(number: int, length: int, *, max_tokens: int = 100, first: int = 0) -> Sequence:
    tokens = list(range(first, first + length))
    return Sequence(number, tokens, length, SamplingParams(max_tokens=max_tokens), noise_key=number)


def run(scheduler: Scheduler, drafts: dict[int, list[int]] | None = None, token: int = 7) -> StepPlan:
    plan = scheduler.plan(drafts or {})
    for item in plan.items:
        scheduler.commit(item, [token] if item.samples else [])
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(item.sequence.id, len(item.token_ids), item.samples) for item in plan.items]


def test_prompts_are_chunked_and_decodes_go_first() -> None:
    scheduler = make(step=40)
    scheduler.add(sequence(1, 10))
    scheduler.add(sequence(2, 70, first=1000))
    assert shape(run(scheduler)) == [(1, 10, 1), (2, 30, 0)]
    assert shape(run(scheduler)) == [(1, 1, 1), (2, 39, 0)]
    assert shape(run(scheduler)) == [(1, 1, 1), (2, 1, 1)]


def test_drafts_leave_room_for_waiting_prompts() -> None:
    scheduler = make(step=40)
    scheduler.add(sequence(1, 10))
    run(scheduler)
    scheduler.add(sequence(2, 100, first=1000))
    draft = list(range(60))
    plan = scheduler.plan({1: draft})
    # A quarter of the 40 tokens stays for the prompt; of 39 left after the decode, 29 for drafts.
    assert shape(plan) == [(1, 30, 30), (2, 10, 0)]
    assert plan.items[0].draft == tuple(draft[:29])


def test_a_draft_never_goes_beyond_max_tokens_or_the_context() -> None:
    scheduler = make()
    scheduler.add(sequence(1, 10, max_tokens=4))
    run(scheduler)
    plan = scheduler.plan({1: [1, 2, 3, 4, 5]})
    assert plan.items[0].draft == (1, 2)  # 3 tokens left: two drafts and one of the target's own
    for item in plan.items:
        scheduler.commit(item, [1, 2, 3])
    assert scheduler.room(plan.items[0].sequence) == 0


def test_a_rejected_draft_gives_its_blocks_back() -> None:
    scheduler = make()
    one = sequence(1, 16)
    scheduler.add(one)
    run(scheduler)
    plan = scheduler.plan({1: list(range(40))})
    assert len(one.blocks) == 4
    scheduler.commit(plan.items[0], [99])
    assert (len(one.blocks), one.computed, len(one.tokens)) == (2, 17, 18)
    scheduler.check_integrity()


def test_prefix_cache_leaves_the_last_token_to_compute() -> None:
    scheduler = make()
    first = sequence(1, 64)
    scheduler.add(first)
    run(scheduler)
    scheduler.remove(first)
    assert (scheduler.blocks.used, scheduler.blocks.cached) == (0, 4)
    again = sequence(2, 64)
    scheduler.add(again)
    plan = scheduler.plan({})
    assert (again.cached_tokens, plan.items[0].start, plan.items[0].samples) == (48, 48, 1)
    longer = sequence(3, 65)
    scheduler.add(longer)
    scheduler.commit(plan.items[0], [7])
    scheduler.plan({})
    assert longer.cached_tokens == 64


def test_a_block_is_reused_only_after_the_same_prefix() -> None:
    scheduler = make()
    blocks: dict[int, list[int]] = {}
    for number, first in ((1, 0), (2, 500)):
        one = sequence(number, 16, first=first)
        one.tokens += range(2000, 2020)
        one.prompt_tokens = len(one.tokens)
        scheduler.add(one)
        run(scheduler)
        blocks[number] = one.blocks[:2]
        scheduler.remove(one)
    again = sequence(3, 16, first=500)
    again.tokens += range(2000, 2020)
    scheduler.add(again)
    scheduler.plan({})
    assert again.blocks[:2] == blocks[2]
    assert not set(blocks[1]) & set(blocks[2])


def test_without_the_cache_nothing_is_found() -> None:
    scheduler = make(cache=False)
    for number in (1, 2):
        one = sequence(number, 64)
        scheduler.add(one)
        run(scheduler)
        assert one.cached_tokens == 0
        scheduler.remove(one)


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens() -> None:
    scheduler = make(blocks=4, cache=False)
    old, young = sequence(1, 31), sequence(2, 31)
    scheduler.add(old)
    scheduler.add(young)
    assert len(run(scheduler).items) == 2
    assert len(run(scheduler).items) == 2  # 32 computed: both tables are full
    assert [item.sequence for item in run(scheduler).items] == [old]
    assert (scheduler.preemptions, scheduler.waiting, young.blocks, young.computed) == (1, 1, [], 0)
    scheduler.remove(old)
    plan = run(scheduler)
    assert shape(plan) == [(2, 33, 1)]
    assert young.prompt_tokens == 31


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make(blocks=2)
    assert scheduler.max_context_tokens == 32
    with pytest.raises(PacelineError) as caught:
        scheduler.add(sequence(1, 32))
    assert caught.value.kind is ErrorKind.CONTEXT_LENGTH_EXCEEDED
    assert "32" in caught.value.message


def test_least_recently_freed_content_goes_first() -> None:
    blocks = BlockManager(3, 2, prefix_cache=True)
    names = [chain_hash(b"", [i, i]) for i in range(3)]
    for name in names:
        block = blocks.take()
        blocks.register(block, name)
        blocks.release([block])
    assert blocks.cached == 3
    blocks.share(blocks.match([names[0]]))
    blocks.release(blocks.match([names[0]]))
    blocks.take()
    assert [len(blocks.match([name])) for name in names] == [1, 0, 1]


def test_chained_hashes_name_the_whole_prefix() -> None:
    assert chain_hash(chain_hash(b"", [1, 2]), [3, 4]) != chain_hash(chain_hash(b"", [9, 2]), [3, 4])


def test_integrity_check_finds_a_leak_and_a_double_owner() -> None:
    blocks = BlockManager(3, 2, prefix_cache=True)
    block = blocks.take()
    blocks.check([[block]])
    with pytest.raises(IntegrityError, match="owners"):
        blocks.check([])
    with pytest.raises(IntegrityError, match="owners"):
        blocks.check([[block], [block]])


def test_null_runner_follows_the_documented_rule() -> None:
    scheduler = make()
    one = sequence(5, 3)
    scheduler.add(one)
    plan = scheduler.plan({})
    result = NullRunner(vocab_size=4000, max_context_tokens=9, kv_cache_tokens=16).execute(plan)[0]
    assert result.chosen == [null_token(5, 0, 2, 4000)]


def test_timed_runner_sleeps_by_tokens_and_slowdown() -> None:
    slept: list[float] = []
    runner = TimedRunner(
        verify_s=0.5,
        verify_token_s=0.25,
        vocab_size=4000,
        max_context_tokens=512,
        kv_cache_tokens=1024,
        sleep=slept.append,
    )
    scheduler = Scheduler(runner, max_sequences=4, max_step_tokens=64, prefix_cache=True)
    scheduler.add(sequence(1, 6))
    plan = scheduler.plan({})
    runner.execute(plan)
    runner.slowdown = 2.0
    runner.execute(plan)
    assert slept == [2.0, 4.0]


def test_a_failing_sequence_fails_once_and_alone() -> None:
    runner = NullRunner(vocab_size=4000, max_context_tokens=512, kv_cache_tokens=1024)
    scheduler = Scheduler(runner, max_sequences=4, max_step_tokens=64, prefix_cache=True)
    scheduler.add(sequence(1, 6))
    scheduler.add(sequence(2, 6))
    runner.fail_next(2)
    plan = scheduler.plan({})
    assert [result.error is None for result in runner.execute(plan)] == [True, False]
    assert [result.error is None for result in runner.execute(plan)] == [True, True]
