"""Torch form of `core.noise`: the same 32 bits and exponentials, on any device, for many ids at once."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.noise import MIX_1, MIX_2, TOKEN_MULTIPLIER, position_words


def _signed(word: int) -> int:
    """A 32-bit word as the int32 that has the same bits."""
    return word - 2**32 if word >= 2**31 else word


# int32 products and sums wrap modulo 2**32, which is what the hash wants; its shifts are logical, hence the
# masks after torch's arithmetic ones. Half the memory traffic of int64.
_TOKEN_MULTIPLIER = _signed(TOKEN_MULTIPLIER)
_MIX_1 = _signed(MIX_1)
_MIX_2 = _signed(MIX_2)


def hashed_ids(token_ids: Tensor) -> Tensor:
    """``id * 0x9E3779B1`` modulo 2**32: the part that depends on the id alone (int32)."""
    return token_ids.to(torch.int32) * _TOKEN_MULTIPLIER


def noise_bits(key: int, position: int, hashed: Tensor) -> Tensor:
    """32 noise bits, as int32, for each id behind ``hashed`` (see `hashed_ids`) at one output position."""
    w0, w1 = position_words(key, position)
    return _mix_(_mix_(hashed + _signed(w0)).bitwise_xor_(_signed(w1)))


def log_exponentials(bits: Tensor) -> Tensor:
    """log E of the standard exponentials ``E = -log1p(-w)``, ``w = (h + 1/2) * 2**-32`` (float64)."""
    w = bits.to(torch.float64)
    w.add_((w < 0) * 2.0**32).add_(0.5).mul_(2.0**-32)
    return w.neg_().log1p_().neg_().log_()


def _mix_(x: Tensor) -> Tensor:
    """lowbias32 in place."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(_MIX_1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_MIX_2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
