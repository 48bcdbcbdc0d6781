"""Kind ``suffix``: the most frequent continuation of the longest match, in this session and in past outputs.

The idea of SuffixDecoding (Oliaro et al., arXiv 2411.04975) over occurrence chains instead of a suffix tree:
the same answer for contexts seen at most ``max_candidates`` times, at a fraction of a tree's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.drafter.kinds import Ask, DraftSession, InlineKind, Proposal, confidence_byte
from paceline.drafter.ngram import match_chance
from paceline.drafter.text_index import SEPARATOR, TextIndex

MIN_PATH_CHANCE = 0.1
"""Drafting ends where the product of the continuation's frequencies falls below this."""

_QUERY_TOKENS = 16


class PastOutputs:
    """Outputs of closed sessions, at most ``max_tokens`` of them: two halves, of which the older is dropped
    when the younger is full."""

    def __init__(self, max_tokens: int) -> None:
        self._half_tokens = max_tokens // 2
        self._young, self._old = TextIndex(), TextIndex()

    @property
    def indexes(self) -> tuple[TextIndex, TextIndex]:
        return self._young, self._old

    def add(self, output: Sequence[int]) -> None:
        kept = output[: max(0, self._half_tokens - 1)]
        if len(self._young.text) + len(kept) + 1 > self._half_tokens:
            self._old, self._young = self._young, TextIndex()
        self._young.extend(kept)
        self._young.extend((SEPARATOR,))


class SuffixKind(InlineKind):
    """Args:
    max_past_tokens: bound on the outputs of finished sessions that are kept, shared by all sessions.
    """

    def __init__(self, *, max_past_tokens: int = 1 << 20) -> None:
        self._indexes: dict[DraftSession, TextIndex] = {}
        self._past = PastOutputs(max_past_tokens)

    def open(self, session: DraftSession) -> None:
        self._indexes[session] = TextIndex()

    def extend(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        self._indexes[session].extend(token_ids)

    def close(self, session: DraftSession) -> None:
        del self._indexes[session]
        output = session.tokens[session.prompt_tokens :]
        if output:
            self._past.add(output)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._propose(self._indexes[ask.session], ask.k) for ask in asks]

    def _propose(self, own: TextIndex, k: int) -> Proposal:
        query = own.text[-_QUERY_TOKENS:]
        found = [(index, *index.longest(query)) for index in (own, *self._past.indexes)]
        longest = max(length for _, length, _ in found)
        places = [(index, p) for index, length, positions in found if length == longest for p in positions]
        token_ids: list[int] = []
        confidence = bytearray()
        path_chance = 1.0
        evidence = match_chance(longest)
        while places and len(token_ids) < k:
            token_id, share = most_frequent(places)
            path_chance *= share
            if token_id == SEPARATOR or path_chance < MIN_PATH_CHANCE:
                break
            token_ids.append(token_id)
            confidence.append(confidence_byte(evidence * share))
            places = [
                (index, p + 1) for index, p in places if index.text[p] == token_id and p + 1 < len(index.text)
            ]
        return Proposal(token_ids, bytes(confidence))


def most_frequent(places: Sequence[tuple[TextIndex, int]]) -> tuple[int, float]:
    """The most frequent next token and its share; on a tie the one at the earliest place of the list."""
    counts = Counter(index.text[p] for index, p in places)
    token_id, count = max(counts.items(), key=lambda item: item[1])
    return token_id, count / len(places)
