"""Kinds ``null`` and ``timed``: the null engine's own token rule, so that every draft is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.core.nullmodel import null_token
from paceline.drafter.kinds import Ask, DraftSession, InlineKind, Proposal


class NullKind(InlineKind):
    """Computes nothing.

    Args:
        vocab_size: of the null verifiers it drafts for.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def open(self, session: DraftSession) -> None:
        """The session's own tokens are all that is needed."""

    def extend(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """Nothing is indexed."""

    def close(self, session: DraftSession) -> None:
        """Nothing is kept."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Proposal:
        session = ask.session
        previous = session.tokens[ask.base_length - 1]
        first = ask.base_length - session.prompt_tokens
        token_ids: list[int] = []
        for position in range(first, first + ask.k):
            previous = null_token(session.noise_key, position, previous, self.vocab_size)
            token_ids.append(previous)
        return Proposal(token_ids, b"\xff" * len(token_ids))


class TimedKind(NullKind):
    """As ``null``, after sleeping ``draft_s`` for each token of the longest draft; a batch shares it."""

    blocking = True

    def __init__(self, vocab_size: int, draft_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(vocab_size)
        self._draft_s = draft_s
        self._sleep = sleep

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self._sleep(self._draft_s * max((ask.k for ask in asks), default=0))
        return super().propose(asks)
