"""The race of coupled sampling, ``argmax_v(log p_v - log E_v)``, over many rows at once.

log p may miss a constant of its row, which cannot change who wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.noise import bits_of, log_exponentials, words

MAX_MARGIN = 1e6
"""Race margin where no other token could have won."""

BAND = 0.5
"""Tokens whose float32 score is this close to the best are raced again in float64, in which the race is
defined; more than float32 can be wrong by (see `noise.log_exponentials`)."""


def race(
    scores: Tensor, keys: Sequence[int], positions: Sequence[int], hashed: Tensor
) -> tuple[Tensor, Tensor]:
    """Winners (columns) and race margins of each row, both ``[rows]``; ties go to the lowest column.

    Args:
        scores: float32 log p, ``[rows, columns]``, each row with a finite entry.
        keys: noise key of each row.
        positions: output position of each row.
        hashed: `noise.hashed_ids` of the columns' token ids, ``[columns]`` or ``[rows, columns]``.
    """
    pairs = words(keys, positions, scores.device)
    rough = scores - log_exponentials(bits_of(hashed, pairs[:, :1], pairs[:, 1:]), torch.float32)
    top = rough.max(dim=1, keepdim=True)
    close = (rough >= top.values - BAND).nonzero()
    row, column = close[:, 0], close[:, 1]
    hashed_close = hashed[column] if hashed.dim() == 1 else hashed[row, column]
    log_e = log_exponentials(bits_of(hashed_close, pairs[row, 0], pairs[row, 1]))
    exact = scores[row, column].to(torch.float64) - log_e
    count, columns = scores.shape
    best = _by_row(exact, row, count)
    # Of the columns that tie for the best, the lowest wins.
    tied = torch.where(exact == best[row], column, columns)
    winner = torch.full((count,), columns, device=scores.device).scatter_reduce_(0, row, tied, "amin")
    exact[column == winner[row]] = -math.inf
    second = _by_row(exact, row, count)
    # Without another token in the band the second is the best of the rest, as float32 has it.
    rough.scatter_(1, winner.unsqueeze(1), -math.inf)
    second = torch.where(second.isinf(), rough.max(dim=1).values.to(torch.float64), second)
    return winner, (best - second).clamp_(max=MAX_MARGIN)


def _by_row(values: Tensor, row: Tensor, count: int) -> Tensor:
    """Maximum of the values of each row."""
    start = torch.full((count,), -math.inf, dtype=values.dtype, device=values.device)
    return start.scatter_reduce_(0, row, values, "amax")
