"""The model kind on a runner whose cache is checked: every step must find the true tokens before it."""

from collections.abc import Sequence
from zlib import crc32

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import SamplingParams
from paceline.drafter.kinds import Ask, DraftSession
from paceline.drafter.model import ModelKind
from paceline.engine.step import ItemResult, StepPlan

VOCAB, BLOCK, EOS = 97, 4, 96


def next_token(tokens: Sequence[int]) -> int:
    """A model that depends on every token before and never ends by itself."""
    return crc32(bytes(tokens)) % EOS


class CheckingRunner:
    """Keeps token ids where a model keeps keys and values, and reads the whole context back from there."""

    vocab_size = VOCAB
    max_context_tokens = 60
    eos_token_ids = frozenset({EOS})
    block_tokens = BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.slots: dict[int, int] = {}
        self.steps: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> list[ItemResult]:
        self.steps.append(plan)
        held = [block for item in plan.items for block in item.sequence.blocks]
        assert len(set(held)) == len(held), "a block belongs to one sequence"
        results = []
        for item in plan.items:
            blocks = item.sequence.blocks
            assert item.start == item.sequence.computed
            for i, token_id in enumerate(item.token_ids, item.start):
                self.slots[blocks[i // BLOCK] * BLOCK + i % BLOCK] = token_id
            end = item.start + len(item.token_ids)
            context = [self.slots[blocks[i // BLOCK] * BLOCK + i % BLOCK] for i in range(end)]
            assert context == item.sequence.tokens[:end]
            results.append(ItemResult([next_token(context)], [1.0]) if item.samples else ItemResult([], []))
        return results

    def fail_next(self, sequence_id: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.slots.clear()


def start(kind: ModelKind, prompt: Sequence[int]) -> DraftSession:
    session = DraftSession(1, 1, len(prompt), len(prompt), SamplingParams(temperature=0.0), 0)
    kind.open(session)
    add(kind, session, prompt)
    return session


def add(kind: ModelKind, session: DraftSession, tokens: Sequence[int]) -> None:
    session.tokens.extend(tokens)
    kind.extend(session, tokens)


def expected_draft(tokens: Sequence[int], k: int) -> list[int]:
    text = list(tokens)
    for _ in range(min(k, CheckingRunner.max_context_tokens - len(tokens))):
        text.append(next_token(text))
    return text[len(tokens) :]


prompts = st.lists(st.integers(0, EOS - 1), min_size=1, max_size=20)
moves = st.tuples(
    st.integers(0, 3),  # session
    st.integers(0, 8),  # k
    st.integers(0, 8),  # draft tokens accepted
    st.integers(0, EOS - 1),  # the target's own token
    st.sampled_from(["commit", "commit", "ask again", "close", "catch up"]),
)


@settings(deadline=None)
@given(st.lists(prompts, min_size=4, max_size=4), st.lists(moves, max_size=30), st.integers(16, 40))
def test_drafts_are_the_models_own_whatever_happened_before(
    starts: list[list[int]], script: list[tuple[int, int, int, int, str]], num_blocks: int
) -> None:
    kind = ModelKind(CheckingRunner(num_blocks), chunk_tokens=64)
    open_sessions = [start(kind, prompt) for prompt in starts]
    for index, k, accepted, own, move in script:
        session = open_sessions[index]
        if move == "catch up":
            kind.catch_up()
            continue
        if move == "close":
            kind.close(session)
            open_sessions[index] = start(kind, starts[index])
            continue
        [proposal] = kind.propose([Ask(session, len(session.tokens), k)])
        assert list(proposal.token_ids) == expected_draft(session.tokens, k)
        assert len(proposal.confidence) == len(proposal.token_ids)
        if move == "commit":
            add(kind, session, [*proposal.token_ids[:accepted], own][: 60 - len(session.tokens)])


def test_a_batch_drafts_all_its_sessions_in_common_steps() -> None:
    runner = CheckingRunner(40)
    kind = ModelKind(runner, chunk_tokens=64)
    batch = [start(kind, [i, i + 1]) for i in range(5)]
    proposals = kind.propose([Ask(session, 2, 1 + i % 3) for i, session in enumerate(batch)])
    assert [list(p.token_ids) for p in proposals] == [expected_draft([i, i + 1], 1 + i % 3) for i in range(5)]
    assert [step.sequences for step in runner.steps] == [5, 3, 1]


def test_a_session_far_behind_does_not_hold_up_the_others() -> None:
    runner = CheckingRunner(40)
    kind = ModelKind(runner, chunk_tokens=8)
    prompt = list(range(40))
    late, level = start(kind, prompt), start(kind, [1, 2])
    asks = [Ask(late, 40, 3), Ask(level, 2, 3)]
    rounds = [[list(p.token_ids) for p in kind.propose(asks)] for _ in range(4)]
    ready = expected_draft([1, 2], 3)
    assert rounds == [[[], ready]] * 3 + [[expected_draft(prompt, 3), ready]]
    # A chunk of 8 beside the level session's prompt; at the end the 16 tokens left beside its one.
    assert max(step.query_tokens for step in runner.steps) == 17


def test_prompts_are_computed_ahead_up_to_the_last_token() -> None:
    runner = CheckingRunner(40)
    kind = ModelKind(runner, chunk_tokens=8)
    session = start(kind, list(range(20)))
    while kind.behind:
        kind.catch_up()
    assert sum(step.query_tokens for step in runner.steps) == 19
    runner.steps.clear()
    kind.propose([Ask(session, 20, 2)])
    assert [step.query_tokens for step in runner.steps] == [1, 1]


def test_what_was_accepted_is_not_computed_again() -> None:
    runner = CheckingRunner(40)
    kind = ModelKind(runner, chunk_tokens=64)
    session = start(kind, [1, 2, 3])
    [proposal] = kind.propose([Ask(session, 3, 4)])
    add(kind, session, [*proposal.token_ids, 5])
    runner.steps.clear()
    kind.propose([Ask(session, len(session.tokens), 1)])
    # The last draft token was chosen but never fed; then the target's own token.
    assert [step.items[0].token_ids for step in runner.steps] == [(proposal.token_ids[-1], 5)]


def test_a_draft_ends_behind_the_end_of_text() -> None:
    class Ending(CheckingRunner):
        def execute(self, plan: StepPlan) -> list[ItemResult]:
            return [ItemResult([EOS], [1.0]) for _ in plan.items]

    for ignore_eos, length in ((False, 1), (True, 4)):
        kind = ModelKind(Ending(40), chunk_tokens=64)
        session = DraftSession(1, 1, 1, 1, SamplingParams(ignore_eos=ignore_eos), 0)
        kind.open(session)
        add(kind, session, [3])
        [proposal] = kind.propose([Ask(session, 1, 4)])
        assert list(proposal.token_ids) == [EOS] * length


def test_logits_that_are_not_finite_cost_one_session_its_draft() -> None:
    class Failing(CheckingRunner):
        def execute(self, plan: StepPlan) -> list[ItemResult]:
            results = super().execute(plan)
            return [
                ItemResult([], [], error="nan") if item.token_ids[-1] == 7 else result
                for item, result in zip(plan.items, results, strict=True)
            ]

    kind = ModelKind(Failing(40), chunk_tokens=64)
    bad, good = start(kind, [7]), start(kind, [8])
    proposals = kind.propose([Ask(bad, 1, 2), Ask(good, 1, 2)])
    assert [len(p.token_ids) for p in proposals] == [0, 2]


def test_closing_returns_every_block() -> None:
    runner = CheckingRunner(5)
    kind = ModelKind(runner, chunk_tokens=64)
    for i in range(20):
        session = start(kind, [i] * 20)
        kind.close(session)  # before the batch that it was asked in
        assert list(kind.propose([Ask(session, 20, 1)])[0].token_ids) == expected_draft([i] * 20, 1)
    assert not kind.behind
