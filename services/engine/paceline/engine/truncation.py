"""min-p, top-k and top-p: which token ids of a row may be chosen at all."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.types import SamplingParams

TOP_CANDIDATES = (256, 4096)
"""Top-p looks at so many ids first; the whole vocabulary is sorted only if their mass falls short."""


def kept_ids(row: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that min-p, top-k and top-p leave, ascending; None if none of them is in use.

    As in vLLM, top-k keeps all ids that tie with the k-th, and top-p measures mass among what min-p and top-k
    left; among equal logits top-p keeps the lowest ids.

    Args:
        row: logits divided by the temperature, ``[vocabulary]``.
    """
    vocab_size = row.shape[0]
    use_top_k = 0 < params.top_k < vocab_size
    if not use_top_k and params.min_p <= 0.0 and params.top_p >= 1.0:
        return None
    threshold = torch.full((), -math.inf, dtype=row.dtype, device=row.device)
    if params.min_p > 0.0:
        threshold = row.max() + math.log(params.min_p)
    if use_top_k:
        threshold = torch.maximum(threshold, row.topk(params.top_k).values[-1])
    if params.top_p >= 1.0:
        return (row >= threshold).nonzero().flatten()
    if use_top_k or params.min_p > 0.0:
        candidates = (row >= threshold).nonzero().flatten()
        kept = _nucleus(row, candidates, row[candidates].logsumexp(0), params.top_p)
        return candidates if kept is None else kept
    total = row.logsumexp(0)
    for count in TOP_CANDIDATES:
        if count < vocab_size:
            candidates = (row >= row.topk(count).values[-1]).nonzero().flatten()
            if (kept := _nucleus(row, candidates, total, params.top_p)) is not None:
                return kept
    everything = torch.arange(vocab_size, device=row.device)
    kept = _nucleus(row, everything, total, params.top_p)
    return everything if kept is None else kept


def truncates(params: SamplingParams, vocab_size: int) -> bool:
    """Whether `kept_ids` may leave out anything."""
    return 0 < params.top_k < vocab_size or params.min_p > 0.0 or params.top_p < 1.0


def _nucleus(row: Tensor, candidates: Tensor, log_total: Tensor, top_p: float) -> Tensor | None:
    """The fewest candidates, likeliest first, that reach ``top_p`` of the mass; None if all fall short."""
    values, order = row[candidates].sort(descending=True, stable=True)
    mass = (values.to(torch.float64) - log_total).exp_().cumsum(0)
    count = int((mass < top_p).sum()) + 1
    if count > candidates.shape[0]:
        return None
    return candidates[order[:count]].sort().values
