"""Rounds without input or output: what a proposal is worth, what a round commits, and the receipt's sums."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.noise import uniform
from paceline.core.sampling import trim
from paceline.core.tokens import EMPTY_HASH, extend_hash
from paceline.core.types import FinishReason, Receipt


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one round did: of the draft, ``accepted`` were committed and ``verified`` came before its end."""

    new_tokens: list[int]
    accepted: int
    verified: int
    finish: FinishReason | None = None
    stop_token_id: int | None = None


def settle(
    draft: Sequence[int],
    chosen: Sequence[int],
    accepted: int,
    *,
    stop_ids: frozenset[int],
    stops_from: int,
    room: int,
) -> Outcome:
    """Commits ``accepted`` drafts and the target's token after them, cut where the choice ends.

    Args:
        chosen: the target's token at each of the ``len(draft) + 1`` positions.
        stops_from: stop ids before this index of the block are ordinary tokens (``min_tokens``).
        room: tokens that may still be committed, at least 1.
    """
    block = [*draft[:accepted], chosen[accepted]]
    for index, token_id in enumerate(block[:room]):
        if index >= stops_from and token_id in stop_ids:
            block = block[: index + 1]
            verified = min(len(draft), len(block))
            return Outcome(block, min(accepted, len(block)), verified, FinishReason.STOP, token_id)
    if len(block) >= room:
        block = block[:room]
        verified = min(len(draft), len(block))
        return Outcome(block, min(accepted, len(block)), verified, FinishReason.LENGTH)
    return Outcome(block, accepted, len(draft))


def synthetic_length(draft: Sequence[int], acceptance: float, key: int, position: int) -> int:
    """Testing: accepted drafts when each is accepted with the given chance, whatever the target chose.

    Args:
        key: noise key of the choice, synthetic domain.
        position: output position of the first draft token.
    """
    for index in range(len(draft)):
        if uniform(key, position + index, 0) >= acceptance:
            return index
    return len(draft)


class PrefixHashes:
    """Prefix hash of a growing token list at every length, computed as far as it was asked for."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._hashes = array("I", [EMPTY_HASH])

    def at(self, length: int) -> int:
        """Hash of the first ``length`` tokens, at most as many as there are."""
        digest = self._hashes[-1]
        for index in range(len(self._hashes) - 1, length):
            digest = extend_hash(digest, (self._tokens[index],))
            self._hashes.append(digest)
        return self._hashes[length]


@dataclass(frozen=True, slots=True)
class Proposal:
    base_length: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Inbox:
    """Proposals of one choice from arrival to use. Every token that arrived ends in one sum of the receipt:
    verified, pruned, late or trimmed; until then it is pending or in flight.

    Args:
        tokens: the choice's tokens, prompt included; grows outside.
    """

    receipt: Receipt
    tokens: Sequence[int]
    vocab_size: int
    hashes: PrefixHashes
    pending: Proposal | None = None
    in_flight: int = 0
    arrived: int = 0
    """Tokens that arrived since the last round."""
    answers: int = field(default=0)
    """Proposals that arrived since the last round, empty ones included."""

    def arrive(self, base_length: int, prefix_hash: int, token_ids: Sequence[int], limit: int) -> str | None:
        """Takes a proposal; returns why not all of it was kept as it is, or None.

        Args:
            limit: draft tokens asked for; more are cut off.
        """
        self.receipt.drafted_tokens += len(token_ids)
        self.arrived += len(token_ids)
        self.answers += 1
        if base_length > len(self.tokens) or self.hashes.at(base_length) != prefix_hash:
            return self._late(len(token_ids), "wrong_base")
        if self.pending is not None:
            if self.pending.base_length == base_length:
                return self._late(len(token_ids), "duplicate")
            if self.pending.base_length > base_length:
                return self._late(len(token_ids), "superseded")
        kept = tuple(token_ids[:limit])
        foreign = next((i for i, t in enumerate(kept) if not 0 <= t < self.vocab_size), None)
        reason = None if len(kept) == len(token_ids) else "over_long"
        if foreign is not None:
            kept, reason = kept[:foreign], "out_of_vocabulary"
        self.receipt.pruned_tokens += len(token_ids) - len(kept)
        if not kept:
            return reason
        if trim(kept, self.tokens[base_length:]) is None:
            return self._late(len(kept), "diverged")
        self.drop()
        self.pending = Proposal(base_length, kept)
        return reason or ("trimmed" if base_length < len(self.tokens) else None)

    def peek(self) -> Sequence[int]:
        """What is left of the pending proposal after the tokens committed since its base."""
        if self.pending is None:
            return ()
        rest = trim(self.pending.token_ids, self.tokens[self.pending.base_length :])
        if not rest:
            if rest is None:
                self.drop()
            else:
                self.receipt.trimmed_tokens += len(self.pending.token_ids)
                self.pending = None
            return ()
        return rest

    def feed(self, count: int) -> None:
        """``count`` tokens of what `peek` showed go into a step; the rest is pruned."""
        self.arrived = self.answers = 0
        if self.pending is None:
            return
        trimmed = len(self.tokens) - self.pending.base_length
        self.receipt.trimmed_tokens += trimmed
        self.receipt.pruned_tokens += len(self.pending.token_ids) - trimmed - count
        self.in_flight = count
        self.pending = None

    def settled(self, verified: int) -> None:
        """The tokens in flight came back; those after the block's end are late."""
        self.receipt.verified_tokens += verified
        self.receipt.late_tokens += self.in_flight - verified
        self.in_flight = 0

    def drop(self) -> None:
        """The pending proposal is superseded, or the choice is over."""
        if self.pending is not None:
            self.receipt.late_tokens += len(self.pending.token_ids)
            self.pending = None

    def close(self) -> None:
        """The choice is over: nothing is pending or in flight any more."""
        self.drop()
        self.settled(0)

    def _late(self, count: int, reason: str) -> str:
        self.receipt.late_tokens += count
        return reason
