"""Prefix hash of a token sequence: the 32-bit guard on every proposal and commit."""

from __future__ import annotations

from collections.abc import Iterable

_MULTIPLIER = 0x9E3779B1
_MASK = 0xFFFFFFFF

EMPTY_HASH = 0x811C9DC5
"""Hash of no tokens."""


def extend_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """Hash of a prefix followed by ``token_ids``, given the prefix's own hash.

    ``h' = ((h ^ t) * 0x9E3779B1 + (h >> 16)) mod 2**32``. It guards against bugs and lost frames, not against
    an adversary: a wrong draft can cost time but never change the output.
    """
    h = prefix_hash
    for token_id in token_ids:
        h = ((h ^ token_id) * _MULTIPLIER + (h >> 16)) & _MASK
    return h


def prefix_hash(token_ids: Iterable[int]) -> int:
    """Hash of a whole sequence."""
    return extend_hash(EMPTY_HASH, token_ids)
