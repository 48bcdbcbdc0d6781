"""Kind ``ngram`` (prompt lookup): what followed the last time the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafter.kinds import Ask, DraftSession, InlineKind, Proposal, confidence_byte
from paceline.drafter.text_index import SEPARATOR, TextIndex


def match_chance(match_tokens: int) -> float:
    """Guess at the chance that a token after a match of n tokens is right: n / (n + 1).

    Longer contexts determine the next token better; not calibrated.
    """
    return match_tokens / (match_tokens + 1)


def copy_from(index: TextIndex, position: int, k: int) -> list[int]:
    """Up to k tokens from ``position``; reading past the text's end goes on in the copy itself.

    So a text that repeats with a period shorter than k is continued for all k tokens.
    """
    text = index.text
    out: list[int] = []
    for i in range(position, position + k):
        token_id = text[i] if i < len(text) else out[i - len(text)]
        if token_id == SEPARATOR:
            break
        out.append(token_id)
    return out


class NgramKind(InlineKind):
    """Longest match of 2 to 16 tokens among the newest 32 occurrences of the last two tokens; the most
    recent of equally long ones."""

    def __init__(self) -> None:
        self._indexes: dict[DraftSession, TextIndex] = {}

    def open(self, session: DraftSession) -> None:
        self._indexes[session] = TextIndex()

    def extend(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        self._indexes[session].extend(token_ids)

    def close(self, session: DraftSession) -> None:
        del self._indexes[session]

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._propose(self._indexes[ask.session], ask.k) for ask in asks]

    def _propose(self, index: TextIndex, k: int) -> Proposal:
        length, positions = index.longest(index.text)
        if not positions:
            return Proposal()
        token_ids = copy_from(index, positions[0], k)
        return Proposal(token_ids, bytes([confidence_byte(match_chance(length))]) * len(token_ids))
