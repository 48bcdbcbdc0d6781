"""Rounds and accounting as pure functions, against brute force and under random timing."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.sampling import accepted_length
from paceline.core.tokens import prefix_hash
from paceline.core.types import FinishReason, Receipt
from paceline.verifier.rounds import Inbox, PrefixHashes, settle, synthetic_length

tokens = st.integers(0, 3)


@given(
    draft=st.lists(tokens, max_size=6),
    more=st.lists(tokens, min_size=7, max_size=7),
    stops=st.frozensets(tokens, max_size=2),
    stops_from=st.integers(0, 5),
    room=st.integers(1, 8),
)
def test_settle_equals_decoding_one_by_one(
    draft: list[int], more: list[int], stops: frozenset[int], stops_from: int, room: int
) -> None:
    chosen = more[: len(draft) + 1]
    # Token by token: the target's own choice as long as the draft agrees with it.
    expected: list[int] = []
    finish = None
    for index, token in enumerate(chosen):
        expected.append(token)
        if index >= stops_from and token in stops:
            finish = FinishReason.STOP
        elif len(expected) == room:
            finish = FinishReason.LENGTH
        if finish is not None or index == len(draft) or draft[index] != token:
            break
    accepted = accepted_length(draft, chosen)
    outcome = settle(draft, chosen, accepted, stop_ids=stops, stops_from=stops_from, room=room)
    assert outcome.new_tokens == expected
    assert outcome.finish is finish
    assert outcome.stop_token_id == (expected[-1] if finish is FinishReason.STOP else None)
    assert outcome.accepted == sum(a == b for a, b in zip(draft, expected, strict=False))
    if finish is None:
        assert outcome.verified == len(draft)
    else:
        assert outcome.accepted <= outcome.verified <= len(expected)


@given(st.lists(st.integers(0, 10_000), max_size=50), st.data())
def test_prefix_hashes_in_any_order(ids: list[int], data: Any) -> None:
    hashes = PrefixHashes(ids)
    for _ in range(4):
        length = data.draw(st.integers(0, len(ids)))
        assert hashes.at(length) == prefix_hash(ids[:length])


def test_synthetic_acceptance_has_the_given_rate() -> None:
    lengths = [synthetic_length([1, 2, 3], 0.5, key, 0) for key in range(4000)]
    shares = [sum(n > i for n in lengths) / len(lengths) for i in range(3)]
    for share, expected in zip(shares, (0.5, 0.25, 0.125), strict=True):
        assert abs(share - expected) < 0.03
    assert synthetic_length([1, 2], 0.0, 1, 0) == 0
    assert synthetic_length([1, 2], 1.0, 1, 0) == 2


class Simulation:
    """A choice whose right continuation is known, and proposals that come whenever they like."""

    def __init__(self) -> None:
        self.tokens = [5, 6, 7]
        self.right = [(i * 7) % 50 for i in range(200)]
        self.receipt = Receipt()
        self.inbox = Inbox(self.receipt, self.tokens, 50, PrefixHashes(self.tokens))

    def arrive(self, back: int, right: int, wrong: list[int], bad_hash: bool, limit: int) -> None:
        """``back`` tokens behind; below 0 the base lies in the future."""
        base = max(0, len(self.tokens) - back)
        digest = prefix_hash(self.tokens[:base]) ^ bad_hash
        done = base - 3
        proposal = self.right[done : done + right] if done >= 0 else []
        self.inbox.arrive(base, digest, proposal + wrong, limit)

    def round(self, budget: int, room: int, meanwhile: list[Any]) -> None:
        draft = list(self.inbox.peek())[:budget]
        self.inbox.feed(len(draft))
        for _, *arguments in meanwhile:
            self.arrive(*arguments)
            self.check()
        done = len(self.tokens) - 3
        chosen = self.right[done : done + len(draft) + 1]
        outcome = settle(
            draft,
            chosen,
            accepted_length(draft, chosen),
            stop_ids=frozenset(),
            stops_from=0,
            room=room,
        )
        self.tokens += outcome.new_tokens
        self.receipt.accepted_tokens += outcome.accepted
        self.inbox.settled(outcome.verified)

    def check(self) -> None:
        receipt, pending = self.receipt, self.inbox.pending
        booked = (
            receipt.verified_tokens + receipt.pruned_tokens + receipt.late_tokens + receipt.trimmed_tokens
        )
        waiting = len(pending.token_ids) if pending else 0
        assert receipt.drafted_tokens == booked + waiting + self.inbox.in_flight
        assert receipt.verified_tokens >= receipt.accepted_tokens
        assert self.tokens == [5, 6, 7, *self.right[: len(self.tokens) - 3]]


arrival = st.tuples(
    st.just("arrive"),
    st.integers(-2, 12),
    st.integers(0, 8),
    st.lists(st.integers(0, 60), max_size=4),
    st.booleans(),
    st.integers(1, 8),
)
event = st.one_of(
    arrival,
    st.tuples(st.just("round"), st.integers(0, 8), st.integers(1, 9), st.lists(arrival, max_size=2)),
)


@settings(max_examples=300)
@given(st.lists(event, max_size=18))
def test_every_drafted_token_ends_in_one_sum(events: list[Any]) -> None:
    simulation = Simulation()
    for name, *arguments in events:
        getattr(simulation, name)(*arguments)
        simulation.check()
    simulation.inbox.close()
    simulation.check()
    assert simulation.inbox.pending is None
    assert simulation.inbox.in_flight == 0


def arrived(
    base: int, ids: list[int], *, limit: int = 8, tokens: list[int] | None = None
) -> tuple[Any, Inbox]:
    tokens = tokens or [1, 2, 3, 4]
    inbox = Inbox(Receipt(), tokens, 100, PrefixHashes(tokens))
    return inbox.arrive(base, prefix_hash(tokens[:base]), ids, limit), inbox


def test_stale_proposals_are_trimmed_or_dropped() -> None:
    reason, inbox = arrived(2, [3, 4, 9, 8])
    assert (reason, list(inbox.peek())) == ("trimmed", [9, 8])
    inbox.feed(1)
    receipt = inbox.receipt
    assert (receipt.trimmed_tokens, receipt.pruned_tokens, inbox.in_flight) == (2, 1, 1)
    reason, inbox = arrived(2, [3, 5, 9])
    assert (reason, list(inbox.peek()), inbox.receipt.late_tokens) == ("diverged", [], 3)
    reason, inbox = arrived(4, [7] * 12, limit=5)
    assert (reason, list(inbox.peek()), inbox.receipt.pruned_tokens) == ("over_long", [7] * 5, 7)
    reason, inbox = arrived(4, [7, 100, 7])
    assert (reason, list(inbox.peek()), inbox.receipt.pruned_tokens) == ("out_of_vocabulary", [7], 2)
    reason, inbox = arrived(0, [1, 2])
    assert (reason, list(inbox.peek()), inbox.receipt.late_tokens) == ("diverged", [], 2)


def test_drafts_after_the_end_of_the_block_are_late() -> None:
    _, inbox = arrived(4, [7, 8, 9, 9])
    inbox.feed(4)
    inbox.settled(2)
    receipt = inbox.receipt
    assert (receipt.drafted_tokens, receipt.verified_tokens, receipt.late_tokens) == (4, 2, 2)
    _, inbox = arrived(4, [7, 8])
    inbox.feed(1)
    inbox.close()
    assert (inbox.receipt.pruned_tokens, inbox.receipt.late_tokens) == (1, 1)


def test_the_newest_base_wins() -> None:
    _, inbox = arrived(4, [7, 8])
    inbox.tokens.append(7)
    assert inbox.arrive(5, prefix_hash([1, 2, 3, 4, 7]), [8, 9], 8) is None
    assert inbox.receipt.late_tokens == 2
    assert inbox.arrive(4, prefix_hash([1, 2, 3, 4]), [7, 8], 8) == "superseded"
    assert inbox.arrive(5, prefix_hash([1, 2, 3, 4, 7]), [8, 9], 8) == "duplicate"
    assert list(inbox.peek()) == [8, 9]
