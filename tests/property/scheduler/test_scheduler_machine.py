"""Random interleavings of the scheduler against direct iteration of the null token rule."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.errors import PacelineError
from paceline.core.nullmodel import null_token
from paceline.core.sampling import accepted_length
from paceline.core.types import SamplingParams
from paceline.engine.null import NullRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Sequence, StepPlan

VOCAB = 3000


def chain(sequence: Sequence, prompt: list[int], count: int) -> list[int]:
    """The only right continuation of a prompt."""
    tokens, previous = [], prompt[-1]
    for position in range(count):
        previous = null_token(sequence.noise_key, position, previous, VOCAB)
        tokens.append(previous)
    return tokens


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(3, 14),
        max_sequences=st.integers(1, 5),
        max_step_tokens=st.integers(1, 24),
        prefix_cache=st.booleans(),
    )
    def start(self, blocks: int, max_sequences: int, max_step_tokens: int, prefix_cache: bool) -> None:
        self.runner = NullRunner(
            vocab_size=VOCAB, max_context_tokens=40, kv_cache_tokens=blocks * 4, block_tokens=4
        )
        self.scheduler = Scheduler(
            self.runner,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
        )
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.live: dict[int, tuple[Sequence, list[int]]] = {}
        self.next_id = 0

    # Few different prompts, so that prefixes are shared.
    @rule(kind=st.integers(0, 1), length=st.integers(1, 22), resumed=st.integers(0, 4), key=st.integers(0, 3))
    def add(self, kind: int, length: int, resumed: int, key: int) -> None:
        prompt = [kind * 100 + i for i in range(length)]
        sequence = Sequence(
            id=self.next_id,
            tokens=list(prompt),
            prompt_tokens=length,
            params=SamplingParams(max_tokens=30),
            noise_key=key,
        )
        sequence.tokens += chain(sequence, prompt, resumed)
        self.next_id += 1
        try:
            self.scheduler.add(sequence)
        except PacelineError:
            assert length + resumed >= self.scheduler.max_context_tokens
            return
        self.live[sequence.id] = (sequence, prompt)

    @rule(data=st.data())
    def step(self, data: Any) -> None:
        drafts: dict[int, list[int]] = {}
        for sequence, prompt in self.live.values():
            if self.scheduler.decoding(sequence) and data.draw(st.booleans()):
                done = len(sequence.tokens) - sequence.prompt_tokens
                right = data.draw(st.integers(0, 4))
                draft = chain(sequence, prompt, done + right)[done:]
                drafts[sequence.id] = draft + data.draw(st.lists(st.integers(0, 5), max_size=3))
        plan = self.scheduler.plan(drafts)
        self.check(plan, drafts)
        for item, result in zip(plan.items, self.runner.execute(plan), strict=True):
            assert len(result.chosen) == item.samples
            tokens: list[int] = []
            if item.samples:
                n = accepted_length(item.draft, result.chosen)
                room = self.scheduler.room(item.sequence)
                tokens = result.chosen[: min(n + 1, room)]
            self.scheduler.commit(item, tokens)
            if self.scheduler.room(item.sequence) == 0:
                self.scheduler.remove(item.sequence)
                del self.live[item.sequence.id]
        if self.live and self.max_step_tokens:
            assert plan.items, "sequences are left and nothing moves"

    def check(self, plan: StepPlan, drafts: dict[int, list[int]]) -> None:
        assert plan.query_tokens <= self.max_step_tokens
        assert len({item.sequence.id for item in plan.items}) == plan.sequences
        for item in plan.items:
            sequence = item.sequence
            assert item.start == sequence.computed
            assert item.token_ids
            assert len(sequence.blocks) * 4 >= item.start + len(item.token_ids)
            committed = len(item.token_ids) - len(item.draft)
            assert list(item.token_ids[:committed]) == sequence.tokens[item.start : item.start + committed]
            given = drafts.get(sequence.id, [])
            assert list(item.draft) == given[: len(item.draft)]
            reaches_end = item.start + committed == len(sequence.tokens)
            assert item.samples == (len(item.draft) + 1 if reaches_end else 0)
            # No two sequences write into one block.
            written = range(item.start // 4, -(-(item.start + len(item.token_ids)) // 4))
            for other in plan.items:
                if other is not item:
                    assert not {sequence.blocks[i] for i in written} & set(other.sequence.blocks)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        sequence, _ = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.scheduler.remove(sequence)
        assert not sequence.blocks

    @precondition(lambda self: not self.live)
    @rule()
    def idle(self) -> None:
        assert self.scheduler.running == self.scheduler.waiting == self.scheduler.blocks.used == 0
        assert self.scheduler.plan({}).items == ()

    @invariant()
    def exact(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.scheduler.running <= self.max_sequences
        assert self.scheduler.running + self.scheduler.waiting == len(self.live)
        for sequence, prompt in self.live.values():
            count = len(sequence.tokens) - sequence.prompt_tokens
            assert sequence.tokens == prompt + chain(sequence, prompt, count)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for sequence, _ in self.live.values():
                self.scheduler.remove(sequence)
            assert self.scheduler.blocks.used == 0
            self.scheduler.check_integrity()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
