"""Shared randomness of coupled sampling: integer-exact noise for (choice key, position, token id).

Drafter and verifier draw the same exponential for the same token, so that
``argmax_v(log p_v - log E_v)`` is an exact sample of p on each side and equal wherever p and q agree
(Daliri et al. 2024, arXiv 2408.07978). The hash uses 32-bit integer arithmetic only, hence it is the same
on every device; ``engine.noise`` holds the torch form. Test vectors: ``docs/noise.md``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MASK64 = 0xFFFFFFFFFFFFFFFF
_MASK32 = 0xFFFFFFFF
TOKEN_MULTIPLIER = 0x9E3779B1
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B


class Domain(IntEnum):
    """Separate streams of noise of one choice."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    SYNTHETIC = 5


def noise_key(seed: int, choice_index: int, prompt_token_ids: Sequence[int], domain: Domain) -> int:
    """64-bit key of one choice's noise: BLAKE2b of seed (int64), choice index, domain and prompt ids."""
    digest = hashlib.blake2b(digest_size=8, person=b"paceline.noise")
    digest.update(struct.pack("<qII", seed, choice_index, int(domain)))
    digest.update(np.asarray(prompt_token_ids, dtype="<u4").tobytes())
    return int.from_bytes(digest.digest(), "little")


def position_words(key: int, position: int) -> tuple[int, int]:
    """Two 32-bit words for an output position (0 is the first token after the original prompt).

    SplitMix64 (Steele et al. 2014) of the key advanced by the position.
    """
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The 32-bit bijection ``lowbias32`` (multipliers 0x7feb352d, 0x846ca68b; shifts 16, 15, 16)."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(MIX_1)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(MIX_2)
    return x ^ (x >> np.uint32(16))


def noise_bits(key: int, position: int, token_ids: NDArray[np.integer]) -> NDArray[np.uint32]:
    """32 noise bits for each token id at one position.

    ``mix(mix(id * 0x9E3779B1 + w0) ^ w1)`` in arithmetic modulo 2**32, w0 and w1 from `position_words`.
    """
    w0, w1 = position_words(key, position)
    ids = token_ids.astype(np.uint32)
    return _mix(_mix(ids * np.uint32(TOKEN_MULTIPLIER) + np.uint32(w0)) ^ np.uint32(w1))


def noise_word(key: int, position: int, token_id: int) -> int:
    """`noise_bits` of one token id in plain integers, several times faster than an array of one."""
    w0, w1 = position_words(key, position)
    return _mix_word(_mix_word((token_id * TOKEN_MULTIPLIER + w0) & _MASK32) ^ w1)


def _mix_word(x: int) -> int:
    """`_mix` in plain integers."""
    x ^= x >> 16
    x = (x * MIX_1) & _MASK32
    x ^= x >> 15
    x = (x * MIX_2) & _MASK32
    return x ^ (x >> 16)


def exponentials(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Standard exponentials ``-log1p(-w)``, ``w = (h + 1/2) * 2**-32``, always in (0, 23)."""
    w = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log1p(-w)


def uniform(key: int, position: int, token_id: int) -> float:
    """One uniform in (0, 1), for draws that are not races (synthetic acceptance)."""
    return (noise_word(key, position, token_id) + 0.5) * 2.0**-32
