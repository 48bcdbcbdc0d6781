"""Chooses the target's token at every sampled position of a step.

Raw logprobs are taken first; then come the processors (see `processors` for the order, which is vLLM's), the
temperature, min-p, top-k and top-p, and the choice: argmax, the race of coupled sampling, or acceptance of
the draft by rejection sampling. Rows of all sequences are chosen together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.types import DraftDistribution, SamplingParams, TokenLogprobs
from paceline.engine.noise import hashed_ids
from paceline.engine.processors import PROCESSORS, Chain, Factory
from paceline.engine.race import MAX_MARGIN, race
from paceline.engine.rejection import Proposed, draw_truncated, verify
from paceline.engine.step import ItemResult, Sequence, StepItem
from paceline.engine.truncation import kept_ids, truncates

NOT_FINITE = "the model's logits were not finite"

CHUNK_SCORES = 1 << 22
"""Scores raced at once, so that the noise of a large batch stays near the cache."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One sampled position: row ``index`` of the logits, draft token ``j`` of its item, if it has one."""

    index: int
    j: int
    item: StepItem

    @property
    def params(self) -> SamplingParams:
        return self.item.sequence.params

    @property
    def position(self) -> int:
        """Output position that the row chooses."""
        item = self.item
        return item.start + len(item.token_ids) - item.samples + 1 + self.j - item.sequence.prompt_tokens

    @property
    def proposed(self) -> Proposed | None:
        """The draft token to accept or reject here; None where the race decides."""
        item, keys = self.item, self.item.sequence.rejection
        if keys is None or self.j >= len(item.draft):
            return None
        return Proposed(
            keys, self.position, item.draft[self.j], item.draft_q[self.j] if item.draft_q else None
        )


class Sampler:
    """Chooses tokens from logits; holds the hashed ids of the vocabulary on the model's device.

    Args:
        processors: factories of logits processors, in order.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, processors: Items[Factory] = PROCESSORS
    ) -> None:
        self._hashed_ids = hashed_ids(torch.arange(vocab_size, device=device))
        self._factories = tuple(processors)

    def choose(self, items: Items[StepItem], logits: Tensor) -> list[ItemResult]:
        """Results in the order of ``items``.

        Args:
            logits: fp32 ``[sum of samples, vocabulary]`` in the order of items; overwritten.
        """
        results = [ItemResult([], []) for _ in items]
        if not logits.shape[0]:
            return results
        # NaN, +inf and all -inf show in the maximum.
        finite = logits.max(dim=1).values.isfinite().tolist()
        rows: list[_Row] = []
        raw: list[Tensor | None] = []
        begin = 0
        for item, result in zip(items, results, strict=True):
            end = begin + item.samples
            logprobs = None
            if not all(finite[begin:end]):
                result.error = NOT_FINITE
            elif item.samples:
                if item.sequence.params.logprobs is not None:
                    logprobs = torch.log_softmax(logits[begin:end], dim=1)
                if chain := self._chain(item.sequence):
                    chain.apply(item, logits[begin:end])
                rows += [_Row(begin + j, j, item) for j in range(item.samples)]
            raw.append(logprobs)
            begin = end
        chosen = _Chosen(logits.shape[0])
        self._greedy([row for row in rows if row.params.greedy], logits, chosen)
        self._sampled([row for row in rows if not row.params.greedy], logits, chosen)
        begin = 0
        for item, result, logprobs in zip(items, results, raw, strict=True):
            end = begin + item.samples
            if result.error is None:
                chosen.fill(result, range(begin, end))
                if logprobs is not None:
                    result.logprobs = _pick_logprobs(logprobs, item.sequence.params, result.chosen)
            begin = end
        return results

    def _chain(self, sequence: Sequence) -> Chain:
        if not isinstance(sequence.chain, Chain):
            sequence.chain = Chain(sequence, self._factories)
        return sequence.chain

    def _greedy(self, rows: list[_Row], logits: Tensor, chosen: _Chosen) -> None:
        """The lowest id of the highest logit."""
        if not rows:
            return
        scores = _select(logits, rows)
        best = scores.max(dim=1)
        scores.scatter_(1, best.indices.unsqueeze(1), -math.inf)
        margins = (best.values - scores.max(dim=1).values).clamp_(max=MAX_MARGIN)
        chosen.put(rows, best.indices, margins)

    def _sampled(self, rows: list[_Row], logits: Tensor, chosen: _Chosen) -> None:
        """Rows at a temperature: by what they are truncated to, and by how they choose."""
        vocab_size = logits.shape[1]
        full: list[_Row] = []
        drawn: list[_Row] = []
        verified: list[_Row] = []
        drafts: list[Proposed] = []
        for row in rows:
            proposed, width = row.proposed, row.item.sequence.truncate_to
            if truncates(row.params, vocab_size):
                scores = logits[row.index].div_(row.params.temperature)
                kept = kept_ids(scores, row.params)
                if kept is not None and proposed is None and not width:
                    self._race([row], scores[kept].unsqueeze(0), self._hashed_ids[kept], chosen, kept)
                    continue
                if kept is not None:
                    scores.copy_(torch.full_like(scores, -math.inf).index_copy_(0, kept, scores[kept]))
            else:
                logits[row.index].div_(row.params.temperature)
            if proposed is not None:
                verified.append(row)
                drafts.append(proposed)
            else:
                (drawn if width else full).append(row)
        for part in _parts(full, vocab_size):
            self._race(part, _select(logits, part), self._hashed_ids, chosen)
        for part in _parts(drawn, vocab_size):
            self._draw(part, _select(logits, part), chosen)
        for part in _parts(verified, vocab_size):
            tokens = verify(_select(logits, part), drafts[: len(part)], self._hashed_ids)
            del drafts[: len(part)]
            chosen.put(part, tokens, None)

    def _race(
        self, rows: list[_Row], scores: Tensor, hashed: Tensor, chosen: _Chosen, kept: Tensor | None = None
    ) -> None:
        winners, margins = race(
            scores, [row.item.sequence.noise_key for row in rows], [row.position for row in rows], hashed
        )
        chosen.put(rows, winners if kept is None else kept[winners], margins)

    def _draw(self, rows: list[_Row], scores: Tensor, chosen: _Chosen) -> None:
        width = max(row.item.sequence.truncate_to for row in rows)
        keys = [row.item.sequence.noise_key for row in rows]
        tokens, margins, distributions = draw_truncated(scores, width, keys, [row.position for row in rows])
        chosen.put(rows, tokens, margins)
        for row, distribution in zip(rows, distributions, strict=True):
            chosen.distributions[row.index] = distribution


class _Chosen:
    """What was chosen so far, by row of the logits."""

    def __init__(self, count: int) -> None:
        self._tokens = [-1] * count
        self._margins: list[float | None] = [None] * count
        self.distributions: dict[int, DraftDistribution] = {}

    def put(self, rows: Iterable[_Row], tokens: Tensor, margins: Tensor | None) -> None:
        values = [None] * tokens.shape[0] if margins is None else margins.tolist()
        for row, token_id, margin in zip(rows, tokens.tolist(), values, strict=True):
            self._tokens[row.index] = token_id
            self._margins[row.index] = margin

    def fill(self, result: ItemResult, rows: range) -> None:
        result.chosen = [self._tokens[row] for row in rows]
        margins = [self._margins[row] for row in rows]
        result.margins = [margin for margin in margins if margin is not None] if None not in margins else []
        if any(row in self.distributions for row in rows):
            result.distributions = [self.distributions[row] for row in rows]


def _select(logits: Tensor, rows: list[_Row]) -> Tensor:
    """The rows' logits, the tensor itself where all of it is meant; to be overwritten."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor([row.index for row in rows], device=logits.device)]


def _parts(rows: list[_Row], vocab_size: int) -> Iterable[list[_Row]]:
    size = max(1, CHUNK_SCORES // vocab_size)
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


def _pick_logprobs(raw: Tensor, params: SamplingParams, chosen: list[int]) -> list[TokenLogprobs]:
    own = raw.gather(1, torch.tensor(chosen, device=raw.device).unsqueeze(1)).flatten().tolist()
    if not params.logprobs:
        return [TokenLogprobs(logprob) for logprob in own]
    top = raw.topk(min(params.logprobs, raw.shape[1]), dim=1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, (ids, values) in zip(own, pairs, strict=True)
    ]
