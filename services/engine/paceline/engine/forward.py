"""Forward passes of a step: from the tokens of its items to the logits at their sampled positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.attention import PagedStep, attending
from paceline.engine.kv_cache import KvCache
from paceline.engine.loading import LoadedModel
from paceline.engine.step import StepItem


class Forward(Protocol):
    """One way of computing a step's logits; runs under ``torch.inference_mode``."""

    def logits(self, items: Sequence[StepItem]) -> Tensor:
        """Writes the keys and values of every token fed; returns fp32 logits ``[sum of samples, vocabulary]``
        in the order of items."""
        ...


@dataclass(frozen=True, slots=True)
class StepRows:
    """The tokens of all items, one after the other.

    Args:
        sampled: rows at which the target chooses.
    """

    token_ids: list[int]
    positions: list[int]
    sampled: list[int]

    @classmethod
    def of(cls, items: Sequence[StepItem]) -> StepRows:
        token_ids: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        for item in items:
            token_ids.extend(item.token_ids)
            positions.extend(range(item.start, item.start + len(item.token_ids)))
            sampled.extend(range(len(token_ids) - item.samples, len(token_ids)))
        return cls(token_ids, positions, sampled)


class RaggedForward:
    """All tokens of a step in one pass of their own number of rows: the fastest without compilation."""

    def __init__(self, model: LoadedModel, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    def logits(self, items: Sequence[StepItem]) -> Tensor:
        model, rows = self._model, StepRows.of(items)
        step = PagedStep(self._cache, items, group=model.group, dtype=model.dtype, device=model.device)
        with attending(step):
            output = model.module(
                input_ids=torch.tensor([rows.token_ids], device=model.device),
                position_ids=torch.tensor([rows.positions], device=model.device),
                use_cache=False,
                logits_to_keep=torch.tensor(rows.sampled, dtype=torch.int64, device=model.device),
            )
        logits: Tensor = output.logits[0]
        return logits.float()
