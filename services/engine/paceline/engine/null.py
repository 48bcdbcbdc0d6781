"""Engines that compute nothing: ``null`` answers at once, ``timed`` after a given time."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.core.nullmodel import null_token
from paceline.core.types import TokenLogprobs
from paceline.engine.step import ItemResult, StepItem, StepPlan

BLOCK_TOKENS = 16


class NullRunner:
    """Chooses by `core.nullmodel.null_token`; every token has probability 1.

    Args:
        kv_cache_tokens: size of the cache that is accounted for, though nothing is stored.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_context_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        kv_cache_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.eos_token_ids = eos_token_ids
        self.block_tokens = block_tokens
        self.num_blocks = max(1, kv_cache_tokens // block_tokens)
        self.slowdown = 1.0
        self._fail: set[int] = set()

    def execute(self, plan: StepPlan) -> list[ItemResult]:
        return [self._result(item) for item in plan.items]

    def fail_next(self, sequence_id: int) -> None:
        self._fail.add(sequence_id)

    def close(self) -> None:
        """Nothing is held."""

    def _result(self, item: StepItem) -> ItemResult:
        sequence = item.sequence
        if item.samples and sequence.id in self._fail:
            self._fail.discard(sequence.id)
            return ItemResult([], [], error="logits are not finite")
        first = len(item.token_ids) - item.samples
        chosen = [
            null_token(
                sequence.noise_key,
                item.start + index + 1 - sequence.prompt_tokens,
                item.token_ids[index],
                self.vocab_size,
            )
            for index in range(first, len(item.token_ids))
        ]
        logprobs = None
        if sequence.params.logprobs is not None:
            count = min(1, sequence.params.logprobs)
            logprobs = [TokenLogprobs(0.0, ((token_id, 0.0),)[:count]) for token_id in chosen]
        return ItemResult(chosen, [], logprobs)


class TimedRunner(NullRunner):
    """As ``null``, after sleeping ``verify_s + verify_token_s`` a token fed, times ``slowdown``."""

    def __init__(
        self,
        *,
        verify_s: float,
        verify_token_s: float,
        vocab_size: int,
        max_context_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        kv_cache_tokens: int,
        block_tokens: int = BLOCK_TOKENS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            eos_token_ids=eos_token_ids,
            kv_cache_tokens=kv_cache_tokens,
            block_tokens=block_tokens,
        )
        self._verify_s = verify_s
        self._verify_token_s = verify_token_s
        self._sleep = sleep

    def execute(self, plan: StepPlan) -> list[ItemResult]:
        self._sleep(self.slowdown * (self._verify_s + self._verify_token_s * plan.query_tokens))
        return super().execute(plan)
