"""The session table under reordered, replayed and stale commits, against a plain model."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.tokens import prefix_hash
from paceline.core.types import SamplingParams
from paceline.drafter.null import NullKind
from paceline.drafter.sessions import CommitStatus, SessionTable

VOCAB = 50


def opened(prompt: list[int], *, generation: int = 1, max_sessions: int = 8) -> SessionTable:
    table = SessionTable(NullKind(VOCAB), max_sessions=max_sessions)
    open_session(table, 7, prompt, generation)
    return table


def open_session(table: SessionTable, session_id: int, prompt: list[int], generation: int = 1) -> None:
    table.begin(
        session_id,
        generation,
        total_tokens=len(prompt),
        prompt_tokens=len(prompt),
        params=SamplingParams(),
        noise_key=0,
    )
    assert table.append(session_id, generation, 0, prompt) is not None


token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(token_lists, token_lists, spans)
def test_commits_of_one_true_text_in_any_order_never_do_harm(
    prompt: list[int], output: list[int], commits: list[tuple[int, int]]
) -> None:
    """Each commit is a slice of the true text; the table must hold exactly the longest reachable prefix."""
    truth = prompt + output
    table = opened(prompt)
    known = len(prompt)
    for a, b in commits:
        base, end = sorted((a % (len(truth) + 1), b % (len(truth) + 1)))
        status, session = table.commit(7, 1, base, prefix_hash(truth[:base]), truth[base:end])
        if base > known:
            assert status is CommitStatus.PREFIX_MISMATCH
        else:
            assert status is CommitStatus.OK
            known = max(known, end)
        assert session is not None
        assert session.tokens.tolist() == truth[:known]
        assert session.hashes.tolist() == [prefix_hash(truth[:i]) for i in range(known + 1)]


@given(token_lists, token_lists, st.data())
def test_commits_that_contradict_are_refused_and_change_nothing(
    prompt: list[int], other: list[int], data: st.DataObject
) -> None:
    table = opened(prompt)
    base = data.draw(st.integers(0, len(prompt)))
    agrees = all(x == y for x, y in zip(prompt[base:], other, strict=False))
    status, session = table.commit(7, 1, base, prefix_hash(prompt[:base]), other)
    assert session is not None
    if agrees:
        assert status is CommitStatus.OK
        merged = prompt[:base] + other
        assert session.tokens.tolist() == max(prompt, merged, key=len)
    else:
        assert status is CommitStatus.PREFIX_MISMATCH
        assert session.tokens.tolist() == prompt


@given(token_lists, st.integers(1, 0xFFFFFFFF))
def test_a_wrong_hash_is_a_mismatch(prompt: list[int], flip: int) -> None:
    table = opened(prompt)
    status, _ = table.commit(7, 1, len(prompt), prefix_hash(prompt) ^ flip, [1])
    assert status is CommitStatus.PREFIX_MISMATCH


@given(st.lists(st.integers(0, 9), max_size=60))
def test_the_least_recently_used_session_goes(ids: list[int]) -> None:
    table = SessionTable(NullKind(VOCAB), max_sessions=3)
    recent: list[int] = []
    for session_id in ids:
        if session_id in recent:
            status, _ = table.commit(session_id, 1, 1, prefix_hash([session_id]), [])
            assert status is CommitStatus.OK
            recent.remove(session_id)
        else:
            open_session(table, session_id, [session_id])
        recent = [*recent, session_id][-3:]
        assert [i for i in range(10) if table.get(i) is not None] == sorted(recent)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), token_lists)
def test_chunks_assemble_to_the_same_session(sizes: list[int], tokens: list[int]) -> None:
    table = SessionTable(NullKind(VOCAB), max_sessions=2)
    table.begin(1, 1, total_tokens=len(tokens), prompt_tokens=1, params=SamplingParams(), noise_key=0)
    offset = 0
    session = None
    for size in [*sizes, len(tokens)]:
        part = tokens[offset : offset + size]
        if part:
            assert session is None
            session = table.append(1, 1, offset, part)
            offset += len(part)
    assert session is not None
    assert session.tokens.tolist() == tokens
    assert session.hashes[-1] == prefix_hash(tokens)
