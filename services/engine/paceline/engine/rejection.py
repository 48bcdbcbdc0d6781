"""Rejection sampling of drafts (Leviathan et al. 2211.17192, Chen et al. 2302.01318), over many rows.

A draft token x is accepted with probability min(1, p(x) / q(x)); else the token is a sample of
norm(max(0, p - q)). Draft, acceptance and residual have noise of separate domains. q is exactly what x was
sampled from: the drafter truncates and renormalizes first, then samples, and sends the truncated q along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.noise import uniform
from paceline.core.types import DraftDistribution
from paceline.engine.noise import hashed_ids
from paceline.engine.race import race
from paceline.engine.step import RejectionKeys


@dataclass(frozen=True, slots=True)
class Proposed:
    """The draft token at one verified position; ``q`` is None for a point mass."""

    keys: RejectionKeys
    position: int
    token_id: int
    q: DraftDistribution | None


def draw_truncated(
    scores: Tensor, width: int, keys: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor, list[DraftDistribution]]:
    """A drafter's tokens, sampled from the ``width`` likeliest of each row, renormalized.

    Args:
        scores: float32 log p up to a constant of the row, ``[rows, vocabulary]``; -inf where truncated.

    Returns:
        Token ids and race margins, both ``[rows]``, and what each was sampled from.
    """
    top = scores.topk(min(width, scores.shape[1]), dim=1)
    log_q = top.values.to(torch.float64).log_softmax(dim=1)
    winner, margins = race(log_q.to(torch.float32), keys, positions, hashed_ids(top.indices))
    probs, ids = log_q.exp().tolist(), top.indices.tolist()
    distributions = [_support(row_ids, row_probs) for row_ids, row_probs in zip(ids, probs, strict=True)]
    return top.indices.gather(1, winner.unsqueeze(1)).flatten(), margins, distributions


def _support(token_ids: list[int], probs: list[float]) -> DraftDistribution:
    pairs = [(v, p) for v, p in zip(token_ids, probs, strict=True) if p > 0.0]
    return DraftDistribution(tuple(v for v, _ in pairs), tuple(p for _, p in pairs))


def verify(scores: Tensor, proposed: Sequence[Proposed], hashed: Tensor) -> Tensor:
    """The token at each position, ``[rows]``: the draft token where accepted, else the residual's sample.

    Args:
        scores: float32 log p up to a constant of the row, ``[rows, vocabulary]``; -inf where truncated.
        hashed: `noise.hashed_ids` of the vocabulary.
    """
    p = scores.to(torch.float64).softmax(dim=1)
    q = torch.zeros_like(p)
    for row, draft in enumerate(proposed):
        if draft.q is None:
            q[row, draft.token_id] = 1.0
        else:
            ids = torch.tensor(draft.q.token_ids, device=p.device)
            q[row, ids] = torch.tensor(draft.q.probs, dtype=p.dtype, device=p.device)
    drafted = torch.tensor([draft.token_id for draft in proposed], device=p.device)
    own = drafted.unsqueeze(1)
    u = [uniform(draft.keys.accept, draft.position, 0) for draft in proposed]
    accepted = torch.tensor(u, dtype=p.dtype, device=p.device).unsqueeze(1) * q.gather(1, own)
    accepted = (accepted < p.gather(1, own)).flatten()
    residual = p.sub_(q).clamp_(min=0.0)
    # Rounding may leave nothing where p equals q: then the draft token is as good a sample.
    accepted |= residual.sum(dim=1) <= 0.0
    chosen = drafted.clone()
    rejected = (~accepted).nonzero().flatten()
    if rejected.numel():
        rest = [proposed[row] for row in rejected.tolist()]
        keys, positions = [r.keys.residual for r in rest], [r.position for r in rest]
        log_residual = residual[rejected].log_().to(torch.float32)
        chosen[rejected], _ = race(log_residual, keys, positions, hashed)
    return chosen
