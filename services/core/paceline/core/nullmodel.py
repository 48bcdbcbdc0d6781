"""The token rule of ``null`` and ``timed`` engines, which compute nothing."""

from __future__ import annotations

from paceline.core.noise import noise_word

FIRST_TOKEN = 1000
"""Ids below are left out: special tokens and end-of-sequence ids of common vocabularies live there."""


def null_token(noise_key: int, position: int, previous: int, vocab_size: int) -> int:
    """Next token: ``first + bits mod (vocab - first)``, bits = noise_word(key, position, previous).

    A function of seed, choice, prompt (through the key), output position and previous token, so that null
    drafters agree with null verifiers and answers are reproducible.
    """
    first = min(FIRST_TOKEN, vocab_size // 2)
    return first + noise_word(noise_key, position, previous) % (vocab_size - first)
