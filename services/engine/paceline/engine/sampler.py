"""Chooses the target's token at every sampled position of a step.

Processors follow vLLM's order: min_tokens masking and logit bias, repetition then frequency and presence
penalties, temperature, min-p, top-k, top-p. At position j penalties and min_tokens count the committed tokens
and the drafts before j. Logprobs are raw, taken before all processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.types import SamplingParams, TokenLogprobs
from paceline.engine.noise import hashed_ids, log_exponentials, noise_bits
from paceline.engine.step import ItemResult, StepItem

MAX_MARGIN = 1e6
"""Race margin where no other token could have won."""

TOP_CANDIDATES = (256, 4096)
"""Top-p looks at so many ids first; the whole vocabulary is sorted only if their mass falls short."""

NOT_FINITE = "the model's logits were not finite"


class Sampler:
    """Chooses tokens from logits; holds the hashed ids of the vocabulary on the model's device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._hashed_ids = hashed_ids(torch.arange(vocab_size, device=device))

    def choose(self, items: Sequence[StepItem], logits: Tensor) -> list[ItemResult]:
        """Results in the order of ``items``.

        Args:
            logits: fp32 ``[sum of samples, vocabulary]`` in the order of items; overwritten.
        """
        if not logits.shape[0]:
            return [ItemResult([], []) for _ in items]
        best = logits.max(dim=1)
        # NaN, +inf and all -inf show in the maximum.
        finite = best.values.isfinite().tolist()
        greedy_ids = best.indices.tolist()
        results: list[ItemResult] = []
        begin = 0
        for item in items:
            end = begin + item.samples
            rows = logits[begin:end]
            if not all(finite[begin:end]):
                results.append(ItemResult([], [], error=NOT_FINITE))
            elif _untouched_greedy(item.sequence.params):
                results.append(self._greedy(rows, greedy_ids[begin:end], item.sequence.params))
            else:
                results.append(self._processed(item, rows))
            begin = end
        return results

    def _greedy(self, rows: Tensor, chosen: list[int], params: SamplingParams) -> ItemResult:
        logprobs = _raw_logprobs(rows, params, chosen)
        if not chosen:
            return ItemResult([], [], logprobs)
        return ItemResult(chosen, _greedy_margins(rows), logprobs)

    def _processed(self, item: StepItem, rows: Tensor) -> ItemResult:
        params = item.sequence.params
        raw = torch.log_softmax(rows, dim=1) if params.logprobs is not None else None
        adjust(item, rows)
        if params.greedy:
            chosen = rows.argmax(dim=1).tolist()
            margins = _greedy_margins(rows) if chosen else []
        else:
            rows.div_(params.temperature)
            chosen, margins = self._race(item, rows)
        logprobs = None if raw is None else _pick_logprobs(raw, params, chosen)
        return ItemResult(chosen, margins, logprobs)

    def _race(self, item: StepItem, rows: Tensor) -> tuple[list[int], list[float]]:
        """``argmax(log p - log E)``; log p up to a constant of the row, which cannot change who wins."""
        sequence = item.sequence
        winners: list[Tensor] = []
        margins: list[Tensor] = []
        first = _output_position(item)
        for j, row in enumerate(rows):
            kept = kept_ids(row, sequence.params)
            hashed = self._hashed_ids if kept is None else self._hashed_ids[kept]
            scores = row if kept is None else row[kept]
            bits = noise_bits(sequence.noise_key, first + j, hashed)
            scores = scores.to(torch.float64) - log_exponentials(bits)
            # Ids are in ascending order and argmax takes the first maximum: ties go to the lowest id.
            winner = scores.argmax()
            margins.append(_margin(scores, winner))
            winners.append(winner if kept is None else kept[winner])
        if not winners:
            return [], []
        return torch.stack(winners).tolist(), torch.stack(margins).clamp_(max=MAX_MARGIN).tolist()


def adjust(item: StepItem, rows: Tensor) -> None:
    """Applies min_tokens, logit bias and penalties to one item's rows, in place."""
    sequence, params = item.sequence, item.sequence.params
    first = _output_position(item)
    if sequence.stop_ids and first < params.min_tokens:
        stop_ids = torch.tensor(sorted(sequence.stop_ids), device=rows.device)
        rows[: params.min_tokens - first].index_fill_(1, stop_ids, -math.inf)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=rows.device)
        rows[:, ids] += torch.tensor(list(params.logit_bias.values()), dtype=rows.dtype, device=rows.device)
    if params.has_penalties:
        for j, row in enumerate(rows):
            _penalize(
                row, params, sequence.tokens, [*sequence.tokens[sequence.prompt_tokens :], *item.draft[:j]]
            )


def _penalize(row: Tensor, params: SamplingParams, tokens: Sequence[int], output: Sequence[int]) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*tokens, *output}), device=row.device)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.unique(torch.tensor(output, device=row.device), return_counts=True)
        row[ids] -= params.frequency_penalty * counts + params.presence_penalty


def kept_ids(row: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that min-p, top-k and top-p leave, ascending; None if none of them is in use.

    As in vLLM, top-k keeps all ids that tie with the k-th, and top-p measures mass among what min-p and top-k
    left; among equal logits top-p keeps the lowest ids.
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


def _nucleus(row: Tensor, candidates: Tensor, log_total: Tensor, top_p: float) -> Tensor | None:
    """The fewest candidates, likeliest first, that reach ``top_p`` of the mass; None if all fall short."""
    values, order = row[candidates].sort(descending=True, stable=True)
    mass = (values.to(torch.float64) - log_total).exp_().cumsum(0)
    count = int((mass < top_p).sum()) + 1
    if count > candidates.shape[0]:
        return None
    return candidates[order[:count]].sort().values


def _untouched_greedy(params: SamplingParams) -> bool:
    return params.greedy and not params.has_penalties and not params.logit_bias and not params.min_tokens


def _output_position(item: StepItem) -> int:
    """Output position that the item's first sampled row chooses."""
    return item.start + len(item.token_ids) - item.samples + 1 - item.sequence.prompt_tokens


def _greedy_margins(rows: Tensor) -> list[float]:
    top = rows.topk(min(2, rows.shape[1]), dim=1).values
    margins: list[float] = (top[:, 0] - top[:, -1]).clamp_(max=MAX_MARGIN).tolist()
    return margins


def _margin(scores: Tensor, winner: Tensor) -> Tensor:
    best = scores[winner].clone()
    scores[winner] = -math.inf
    return best - scores.max()


def _raw_logprobs(rows: Tensor, params: SamplingParams, chosen: list[int]) -> list[TokenLogprobs] | None:
    if params.logprobs is None:
        return None
    return _pick_logprobs(torch.log_softmax(rows, dim=1), params, chosen)


def _pick_logprobs(raw: Tensor, params: SamplingParams, chosen: list[int]) -> list[TokenLogprobs]:
    if not chosen:
        return []
    own = raw.gather(1, torch.tensor(chosen, device=raw.device).unsqueeze(1)).flatten().tolist()
    if not params.logprobs:
        return [TokenLogprobs(logprob) for logprob in own]
    top = raw.topk(min(params.logprobs, raw.shape[1]), dim=1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, (ids, values) in zip(own, pairs, strict=True)
    ]
