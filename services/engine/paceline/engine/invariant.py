"""Steps whose row results depend on nothing but the row's own sequence: `exact` in bf16 and fp16.

A matrix product sums in an order that depends on the number of rows it is given, and 16-bit results then
differ in the last place between one query token and five. Here every pass has the same shape: ``ROWS`` rows,
padded, larger steps in several passes. Attention reads each row's context in chunks of ``CHUNK`` positions
from position 0 on, merged in order by the online softmax (Milakov and Gimelshein, 1805.02867). So every
operation meets every row in the same shape, whatever the batch, the draft length, the prefill chunk or the
prefix cache. That a kernel treats all rows of one shape alike is checked at load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.engine.attention import attending
from paceline.engine.kv_cache import KvCache
from paceline.engine.loading import LoadedModel
from paceline.engine.step import StepItem

ROWS = 8
"""Query tokens of every pass. One decoding sequence pays for all of them, a draft of up to 7 is free."""

CHUNK = 128
"""Context positions of every attention call."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One query token: its place in the sequence's context, and the sequence's block table."""

    token_id: int
    position: int
    blocks: Sequence[int]


class InvariantStep:
    """Attention of one pass of ``ROWS`` query tokens; every call has the same shape.

    Args:
        rows: the real ones, at most ``ROWS``; padding repeats the first without writing it twice.
    """

    def __init__(self, cache: KvCache, rows: Sequence[_Row], device: torch.device) -> None:
        self._cache = cache
        positions = np.asarray([row.position for row in rows], dtype=np.int64)
        self._count = len(rows)
        self._chunks = int(positions.max()) // CHUNK + 1
        written = [cache.slots(row.blocks, row.position, row.position + 1) for row in rows]
        self._written = torch.from_numpy(np.concatenate(written)).to(device)
        # Beyond a row's context its own first slot is read and masked: that one is always written.
        width = self._chunks * CHUNK
        slots = np.empty((ROWS, width), dtype=np.int64)
        for index, row in enumerate(rows):
            own = cache.slots(row.blocks, 0, row.position + 1)
            slots[index] = own[0]
            slots[index, : len(own)] = own
        slots[len(rows) :] = slots[0, 0]
        context = np.zeros(ROWS, dtype=np.int64)
        context[: len(rows)] = positions
        masked = np.arange(width)[None, :] > context[:, None]
        self._slots = torch.from_numpy(slots).to(device).view(ROWS, self._chunks, CHUNK)
        self._masked = torch.from_numpy(masked).to(device).view(ROWS, 1, 1, self._chunks, CHUNK)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        options: dict[str, Any],
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._written, key[: self._count])
        values.index_copy_(0, self._written, value[: self._count])
        rows, heads, dim = query.shape
        kv_heads = keys.shape[1]
        folded = query.view(rows, kv_heads, heads // kv_heads, dim).to(torch.float32)
        folded = folded * (dim**-0.5 if scaling is None else scaling)
        best = torch.full((*folded.shape[:3], 1), -math.inf, device=query.device)
        total = torch.zeros_like(best)
        output = torch.zeros_like(folded)
        for chunk in range(self._chunks):
            slots = self._slots[:, chunk].flatten()
            scores = folded @ self._read(keys, slots).transpose(2, 3)
            scores.masked_fill_(self._masked[:, :, :, chunk], -math.inf)
            higher = torch.maximum(best, scores.amax(dim=3, keepdim=True))
            scores.sub_(higher).exp_()
            rescale = best.sub_(higher).exp_()
            total.mul_(rescale).add_(scores.sum(dim=3, keepdim=True))
            output.mul_(rescale).add_(scores @ self._read(values, slots))
            best = higher
        return output.div_(total).view(rows, heads, dim).to(query.dtype)

    def _read(self, cache: Tensor, slots: Tensor) -> Tensor:
        """fp32 ``[ROWS, kv_heads, CHUNK, head_dim]``."""
        gathered = cache.index_select(0, slots).view(ROWS, CHUNK, *cache.shape[1:])
        return gathered.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)


class InvariantForward:
    """Passes of ``ROWS`` tokens; implements `forward.Forward`."""

    def __init__(self, model: LoadedModel, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    def logits(self, items: Sequence[StepItem]) -> Tensor:
        rows: list[_Row] = []
        sampled: list[int] = []
        for item in items:
            count = len(item.token_ids)
            sampled.extend(range(len(rows) + count - item.samples, len(rows) + count))
            rows.extend(
                _Row(token_id, item.start + i, item.sequence.blocks)
                for i, token_id in enumerate(item.token_ids)
            )
        parts = []
        for begin in range(0, len(rows), ROWS):
            wanted = [index - begin for index in sampled if begin <= index < begin + ROWS]
            parts.append(self._pass(rows[begin : begin + ROWS], wanted))
        return torch.cat(parts)

    def _pass(self, rows: Sequence[_Row], wanted: Sequence[int]) -> Tensor:
        """fp32 logits ``[wanted, vocabulary]`` of one pass."""
        model = self._model
        padding = ROWS - len(rows)
        with attending(InvariantStep(self._cache, rows, model.device)):
            output = model.module(
                input_ids=torch.tensor([[row.token_id for row in rows] + [0] * padding], device=model.device),
                position_ids=torch.tensor(
                    [[row.position for row in rows] + [0] * padding], device=model.device
                ),
                use_cache=False,
                # All rows or one: the product with the output head has the same shape whenever it counts.
                logits_to_keep=0 if wanted else 1,
            )
        logits: Tensor = output.logits[0]
        if not wanted:
            return logits[:0].float()
        return logits[torch.tensor(wanted, device=model.device)].float()

    def check(self) -> None:
        """Computes tokens of one sequence in several orders; changes the first blocks of the cache.

        Raises:
            ConfigError: a token's logits depend on its row, so that this machine has no exact 16-bit mode.
        """
        blocks = range(min(self._cache.num_blocks, -(-4 * ROWS // self._cache.block_tokens)))
        length = min(4 * ROWS, len(blocks) * self._cache.block_tokens)
        vocab_size = self._model.module.config.vocab_size
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        rows = [_Row(token_id, position, blocks) for position, token_id in enumerate(tokens)]
        for begin in range(0, length, ROWS):
            part = rows[begin : begin + ROWS]
            first = self._in_order(part, range(len(part)))
            backward = self._in_order(part, range(len(part) - 1, -1, -1))
            rotated = self._in_order(part, [*range(1, len(part)), 0])
            alone = self._in_order(part[-1:], [0])
            if not all(torch.equal(first, other) for other in (backward, rotated)):
                raise self._refusal("row")
            if not torch.equal(alone, first[-1:]):
                raise self._refusal("batch")

    def _refusal(self, cause: str) -> ConfigError:
        model = self._model
        return ConfigError(
            f"exact: results of {model.dtype} on {model.device} depend on the {cause} here; use dtype float32"
        )

    def _in_order(self, rows: Sequence[_Row], order: Iterable[int]) -> Tensor:
        order = list(order)
        logits = self._pass([rows[index] for index in order], range(len(order)))
        return torch.stack([logits[order.index(index)] for index in range(len(order))])
