"""Logits processors of a sequence, with state that follows its output and rolls back by position.

Order, as in vLLM: the processors that forbid or favour tokens (min_tokens, logit bias; a grammar mask belongs
before them), then repetition, frequency and presence penalties; temperature, min-p, top-k and top-p follow in
`sampler`. Raw logprobs are taken before all of them.

At output position j a processor has seen the committed tokens and the drafts before j. A new processor is one
more factory: the engine feeds it, rolls it back and asks it in order, and knows nothing else about it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.types import SamplingParams
from paceline.engine.step import Sequence, StepItem


class Processor(Protocol):
    """State after a prefix of one sequence's output."""

    def accept(self, token_id: int) -> None:
        """The output is one token longer."""

    def rollback(self, count: int) -> None:
        """The last ``count`` tokens accepted are not part of the output."""

    def apply(self, row: Tensor) -> None:
        """Changes the fp32 logits ``[vocabulary]`` of the next token, in place; not finite but -inf is an
        error of the model's, never made here. At least one token stays possible."""


Factory = Callable[[Sequence], Processor | None]
"""Makes a sequence's processor at empty output; None where its parameters ask for none."""


class MinTokens:
    """Masks the ids that end a choice while fewer than ``min_tokens`` are there."""

    def __init__(self, stop_ids: Iterable[int], min_tokens: int) -> None:
        self._stop_ids = torch.tensor(sorted(stop_ids))
        self._left = min_tokens

    @classmethod
    def of(cls, sequence: Sequence) -> MinTokens | None:
        min_tokens = sequence.params.min_tokens
        return cls(sequence.stop_ids, min_tokens) if min_tokens and sequence.stop_ids else None

    def accept(self, token_id: int) -> None:
        self._left -= 1

    def rollback(self, count: int) -> None:
        self._left += count

    def apply(self, row: Tensor) -> None:
        if self._left > 0:
            row.index_fill_(0, self._stop_ids.to(row.device), -math.inf)


class LogitBias:
    """Adds to the logits of given ids."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = torch.tensor(list(bias))
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    @classmethod
    def of(cls, sequence: Sequence) -> LogitBias | None:
        bias = sequence.params.logit_bias
        return cls(dict(bias)) if bias else None

    def accept(self, token_id: int) -> None:
        """The bias is the same at every position."""

    def rollback(self, count: int) -> None:
        """The bias is the same at every position."""

    def apply(self, row: Tensor) -> None:
        row.index_add_(0, self._ids.to(row.device), self._values.to(row.device))


class Penalties:
    """Repetition penalty on tokens of prompt and output (Keskar et al. 1909.05858), then frequency and
    presence penalties on tokens of the output alone."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self._params = params
        self._in_prompt = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        self._prompt_ids = torch.tensor(sorted(self._in_prompt), dtype=torch.int64)
        self._output: list[int] = []
        self._counts: Counter[int] = Counter()

    @classmethod
    def of(cls, sequence: Sequence) -> Penalties | None:
        if not sequence.params.has_penalties:
            return None
        return cls(sequence.params, sequence.tokens[: sequence.prompt_tokens])

    def accept(self, token_id: int) -> None:
        self._output.append(token_id)
        self._counts[token_id] += 1

    def rollback(self, count: int) -> None:
        for _ in range(count):
            token_id = self._output.pop()
            self._counts[token_id] -= 1
            if not self._counts[token_id]:
                del self._counts[token_id]

    def apply(self, row: Tensor) -> None:
        params = self._params
        ids = torch.tensor(list(self._counts), dtype=torch.int64, device=row.device)
        if params.repetition_penalty != 1.0:
            fresh = [token_id for token_id in self._counts if token_id not in self._in_prompt]
            for seen in (
                self._prompt_ids.to(row.device),
                torch.tensor(fresh, dtype=torch.int64).to(row.device),
            ):
                values = row[seen]
                factor = params.repetition_penalty
                row[seen] = torch.where(values > 0, values / factor, values * factor)
        if params.frequency_penalty or params.presence_penalty:
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=row.device)
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty


PROCESSORS: tuple[Factory, ...] = (MinTokens.of, LogitBias.of, Penalties.of)


class Chain:
    """One sequence's processors, kept level with its committed output between steps.

    Args:
        factories: in the order of application.
    """

    def __init__(self, sequence: Sequence, factories: Tokens[Factory]) -> None:
        made = [factory(sequence) for factory in factories]
        self._processors = [processor for processor in made if processor is not None]
        self._output: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._processors)

    def apply(self, item: StepItem, rows: Tensor) -> None:
        """Changes the rows of the item's sampled positions, in place."""
        sequence = item.sequence
        end = item.start + len(item.token_ids) - len(item.draft)
        self._move(sequence.tokens[sequence.prompt_tokens : end])
        for j, row in enumerate(rows):
            if j:
                self._accept(item.draft[j - 1])
            for processor in self._processors:
                processor.apply(row)

    def _move(self, output: list[int]) -> None:
        """Rolls back what is not committed, then accepts what is new."""
        known = self._output
        same = min(len(known), len(output))
        while known[:same] != output[:same]:
            same -= 1
        if len(known) > same:
            for processor in self._processors:
                processor.rollback(len(known) - same)
            del known[same:]
        for token_id in output[same:]:
            self._accept(token_id)

    def _accept(self, token_id: int) -> None:
        self._output.append(token_id)
        for processor in self._processors:
            processor.accept(token_id)
