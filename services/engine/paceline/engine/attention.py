"""Attention over paged keys and values for a ragged step, plugged into transformers' attention interface.

All items of a step share one forward pass over their concatenated tokens; only attention tells them apart.
The step in force is thread-local: models of several runners may run at once, each in its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from paceline.engine.kv_cache import KvCache, LayerShape
from paceline.engine.step import StepItem

IMPLEMENTATION = "paceline"


class AttentionStep(Protocol):
    """What the attention of one forward pass does."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Takes ``[tokens, heads, head_dim]`` tensors, returns one like ``query``."""
        ...


@dataclass(frozen=True, slots=True)
class _Span:
    """One item: its rows in the step, its slots in the cache (a view if ``slots`` is None), its mask."""

    begin: int
    end: int
    first_slot: int
    context: int
    slots: Tensor | None
    mask: Tensor | None


class PagedStep:
    """Writes the new keys and values, then attends each item to its own context.

    Query heads that share a key head are folded into rows, so keys are never repeated in memory. Everything
    that does not depend on the layer is computed once, here.
    """

    def __init__(
        self,
        cache: KvCache,
        items: Sequence[StepItem],
        *,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._cache = cache
        written: list[Tensor] = []
        self._spans: list[_Span] = []
        begin = 0
        for item in items:
            count = len(item.token_ids)
            context = item.start + count
            blocks = item.sequence.blocks
            written.append(torch.from_numpy(cache.slots(blocks, item.start, context)))
            first_slot = cache.run(blocks, context)
            slots = None
            if first_slot is None:
                slots = torch.from_numpy(cache.slots(blocks, 0, context)).to(device)
            self._spans.append(
                _Span(
                    begin=begin,
                    end=begin + count,
                    first_slot=first_slot or 0,
                    context=context,
                    slots=slots,
                    mask=_causal_mask(item.start, count, group, dtype, device),
                )
            )
            begin += count
        self._written = torch.cat(written).to(device)

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
        keys.index_copy_(0, self._written, key)
        values.index_copy_(0, self._written, value)
        _, heads, dim = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for span in self._spans:
            if span.slots is None:
                k = keys.narrow(0, span.first_slot, span.context)
                v = values.narrow(0, span.first_slot, span.context)
            else:
                k = keys.index_select(0, span.slots)
                v = values.index_select(0, span.slots)
            count = span.end - span.begin
            rows = query[span.begin : span.end].view(count, kv_heads, group, dim).transpose(0, 1)
            attended = scaled_dot_product_attention(
                rows.reshape(1, kv_heads, count * group, dim),
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                attn_mask=span.mask,
                scale=scaling,
            )
            output[span.begin : span.end] = (
                attended.view(kv_heads, count, group, dim).transpose(0, 1).reshape(count, heads, dim)
            )
        return output


class ProbeStep:
    """Records what each layer asks of attention, with ordinary attention in place of the cache."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}
        self.calls = 0
        self.value_dims: set[int] = set()
        self.key_dims: set[int] = set()
        self.options: dict[str, Any] = {}
        self.group = 1

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        options: dict[str, Any],
    ) -> Tensor:
        self.calls += 1
        self.layers[layer] = LayerShape(kv_heads=key.shape[1], head_dim=key.shape[2])
        self.key_dims.add(key.shape[2])
        self.value_dims.add(value.shape[2])
        self.options.update({name: option for name, option in options.items() if option is not None})
        self.group = query.shape[1] // key.shape[1]
        # One token attends to itself alone: its output is its value.
        return value.repeat_interleave(self.group, dim=1)


class _Current(threading.local):
    step: AttentionStep | None = None


_current = _Current()


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Forward passes of this thread use ``step`` while the context lasts."""
    previous, _current.step = _current.step, step
    try:
        yield
    finally:
        _current.step = previous


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    step = _current.step
    if step is None:
        raise RuntimeError("a model with paged attention runs only inside attending()")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(layer, query, key, value, scaling, options).unsqueeze(0), None


def _causal_mask(
    start: int, count: int, group: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive mask of ``count * group`` folded rows, or None for a single query token, which sees all."""
    if count == 1:
        return None
    mask = torch.full((count, start + count), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(start + 1).repeat_interleave(group, dim=0)


AttentionInterface.register(IMPLEMENTATION, _attention)
