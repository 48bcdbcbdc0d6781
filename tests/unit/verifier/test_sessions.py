"""Draft sessions on a link: opening, commits, and opening again ever more rarely."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from paceline.core.tokens import prefix_hash
from paceline.core.types import Receipt, SamplingParams
from paceline.engine.step import Sequence
from paceline.v1 import drafter_pb2
from paceline.verifier.rounds import Inbox, PrefixHashes
from paceline.verifier.sessions import Sessions

UNKNOWN = drafter_pb2.PROPOSAL_STATUS_UNKNOWN_SESSION
OK = drafter_pb2.PROPOSAL_STATUS_OK


def make() -> tuple[Sessions, Any, Counter[str]]:
    stale: Counter[str] = Counter()
    tokens = [1, 2, 3]
    choice = SimpleNamespace(
        session_id=9,
        session_gen=0,
        sequence=Sequence(1, tokens, 3, SamplingParams(), noise_key=5),
        inbox=Inbox(Receipt(), tokens, 100, PrefixHashes(tokens)),
    )
    return Sessions(lambda reason: stale.update([reason]), lambda _: None), choice, stale


def opened(sessions: Sessions, choice: Any) -> None:
    for action in sessions.take_actions():
        if action.HasField("open"):
            sessions.opened(
                drafter_pb2.SessionOpened(
                    session_id=9, session_gen=choice.session_gen, length=action.open.total_tokens
                )
            )


def answer(choice: Any, base: int, ids: list[int], status: Any = OK) -> drafter_pb2.SessionProposal:
    return drafter_pb2.SessionProposal(
        session_id=9,
        session_gen=choice.session_gen,
        status=status,
        base_length=base,
        prefix_hash=prefix_hash(choice.sequence.tokens[:base]),
        token_ids=ids,
    )


def test_nothing_is_asked_before_the_session_is_open() -> None:
    sessions, choice, _ = make()
    assert sessions.ask(choice, 4) == "opening"
    assert sessions.take_commits(1, 0.0) == []
    opened(sessions, choice)
    assert sessions.ask(choice, 4) is None
    (commit,) = sessions.take_commits(1, 0.0)
    assert (commit.session_gen, commit.base_length, list(commit.token_ids), commit.ask_tokens) == (
        1,
        3,
        [],
        4,
    )


def test_commits_are_cumulative_until_acknowledged_and_the_newest_ask_wins() -> None:
    sessions, choice, _ = make()
    sessions.ask(choice, 4)
    opened(sessions, choice)
    choice.sequence.tokens += [4]
    sessions.ask(choice, 4)
    choice.sequence.tokens += [5]
    sessions.ask(choice, 2)
    (commit,) = sessions.take_commits(1, 0.0)
    assert (commit.base_length, list(commit.token_ids), commit.ask_tokens) == (3, [4, 5], 2)
    assert sessions.take_commits(2, 0.0) == []
    choice.sequence.tokens += [6]
    sessions.ask(choice, 2)
    (commit,) = sessions.take_commits(2, 0.0)
    assert (commit.base_length, list(commit.token_ids)) == (3, [4, 5, 6]), "nothing was acknowledged yet"
    assert sessions.deliver(answer(choice, 5, [6, 7]), 1) is choice
    assert list(choice.inbox.peek()) == [7]
    assert sessions.asked_at(choice, 1.0) == 0.0, "the newer ask is still open"
    sessions.ask(choice, 2)
    (commit,) = sessions.take_commits(3, 0.0)
    assert (commit.base_length, list(commit.token_ids)) == (5, [6])
    assert commit.prefix_hash == prefix_hash([1, 2, 3, 4, 5])


def test_a_session_that_keeps_failing_is_opened_ever_more_rarely() -> None:
    sessions, choice, stale = make()
    for _ in range(300):
        sessions.ask(choice, 4)
        opened(sessions, choice)
        if sessions.ask(choice, 4) is None:
            sessions.take_commits(1, 0.0)
            sessions.deliver(answer(choice, 3, [], UNKNOWN), 1)
    assert 5 <= choice.session_gen <= 12
    assert stale["session_unknown_to_drafter"] == choice.session_gen


def test_answers_of_an_older_generation_or_nobody_are_counted() -> None:
    sessions, choice, stale = make()
    sessions.ask(choice, 4)
    opened(sessions, choice)
    sessions.ask(choice, 4)
    sessions.take_commits(1, 0.0)
    old = answer(choice, 3, [4])
    old.session_gen = 0
    assert sessions.deliver(old, 1) is None
    sessions.close(choice)
    assert sessions.deliver(answer(choice, 3, [4]), 1) is None
    assert stale == {"wrong_generation": 1, "unknown_session": 1}
    assert [a.WhichOneof("action") for a in sessions.take_actions()] == ["close"]
    assert choice.inbox.receipt.drafted_tokens == 0
