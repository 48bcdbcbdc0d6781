"""Where the end of one text occurs in another: the index under n-gram and suffix drafting."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

SEPARATOR = 0xFFFFFFFF
"""Between texts of one index. Not a token id: it equals nothing in a query and ends a continuation."""

_NONE = -1


class TextIndex:
    """An append-only text in which recent occurrences of a query's end are found.

    For each pair of neighbouring tokens a chain links its occurrences, newest first (as LZ77 compressors
    do). A lookup walks at most ``max_candidates`` links and measures each match backwards up to
    ``max_match_tokens``. Appending is O(1) a token; memory is 8 bytes a token plus one entry a distinct pair.

    Args:
        max_match_tokens: longer matches count as this long.
        max_candidates: occurrences looked at, from the newest.
    """

    MIN_MATCH_TOKENS = 2
    """One equal token is too weak: a wrong draft costs verification."""

    def __init__(self, *, max_match_tokens: int = 16, max_candidates: int = 32) -> None:
        self.text = array("I")
        self._max_match = max_match_tokens
        self._max_candidates = max_candidates
        self._newest: dict[int, int] = {}
        self._earlier = array("q")

    def extend(self, token_ids: Iterable[int]) -> None:
        text, newest, earlier = self.text, self._newest, self._earlier
        last = text[-1] if text else SEPARATOR
        for token_id in token_ids:
            text.append(token_id)
            pair = last << 32 | token_id
            earlier.append(newest.get(pair, _NONE))
            newest[pair] = len(text)
            last = token_id

    def longest(self, query: Sequence[int]) -> tuple[int, list[int]]:
        """The longest match of the query's end, and the positions after each such match, newest first.

        A match that ends where the text ends is left out: nothing follows it. ``(0, [])`` if there is none.
        """
        if len(query) < self.MIN_MATCH_TOKENS:
            return 0, []
        best, positions = 0, list[int]()
        end = len(self.text)
        position = self._newest.get(query[-2] << 32 | query[-1], _NONE)
        left = self._max_candidates
        while position != _NONE and left:
            if position < end:
                left -= 1
                length = self._match_length(query, position)
                if length > best:
                    best, positions = length, [position]
                elif length == best:
                    positions.append(position)
            position = self._earlier[position - 1]
        return best, positions

    def _match_length(self, query: Sequence[int], position: int) -> int:
        text = self.text
        limit = min(self._max_match, len(query), position)
        n = self.MIN_MATCH_TOKENS
        while n < limit and query[-1 - n] == text[position - 1 - n]:
            n += 1
        return n
