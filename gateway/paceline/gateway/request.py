"""One client request with its choices: what was committed, what was sent, how it ended."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.types import (
    FinishReason,
    LatencyMs,
    Receipt,
    RoundRecord,
    SamplingParams,
    SloClass,
    SpeculationOptions,
    TermSeconds,
    TokenLogprobs,
)
from paceline.gateway.stops import StopMatcher
from paceline.gateway.tokenizer import Detokenizer

if TYPE_CHECKING:
    from paceline.gateway.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request for one prompt; ``sampling`` has its seed and max_tokens.

    Args:
        timeout_s: longest wait in the queue.
        caller_timeout_s: what the caller said it waits; None if it said nothing.
        kv_tokens: estimate of the KV cache it will fill, for admission.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    slo: SloClass
    tenant: str
    priority: int
    timeout_s: float
    caller_timeout_s: float | None
    kv_tokens: int


@dataclass(slots=True)
class Delta:
    """New output of one choice; ``finish`` marks its last."""

    choice: int
    offset: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


class Choice:
    """One choice: the tokens committed so far, and the text they make."""

    def __init__(self, index: int, job: Job, codec: TextCodec) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.stopped_by_text = False
        self.cached_tokens = 0
        self.receipt = Receipt(request_id=job.request_id, model=job.model, seed=job.sampling.seed or 0)
        self.has_receipt = False
        self.rounds: list[RoundRecord] = []
        self.terms = TermSeconds()
        self.begun = False
        self.resumes = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._min_tokens = job.sampling.min_tokens
        self._max_tokens = sys.maxsize if job.sampling.max_tokens is None else job.sampling.max_tokens
        self._stop_ids = frozenset(job.sampling.stop_token_ids) | (
            frozenset() if job.sampling.ignore_eos else codec.eos_token_ids
        )
        self._detokenizer = Detokenizer(codec, job.prompt_token_ids)
        self._matcher = StopMatcher(job.sampling.stop)

    def commit(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Delta:
        """Takes tokens from ``offset`` of the output on; those known already are left out.

        Raises:
            PacelineError: INTERNAL if tokens before ``offset`` are missing.
        """
        start = len(self.token_ids)
        if offset > start:
            raise PacelineError(
                ErrorKind.INTERNAL, f"output tokens {start} to {offset - 1} were not delivered"
            )
        delta = Delta(self.index, start)
        if self.finish is not None or self.stopped_by_text:
            return delta
        for i in range(start - offset, len(token_ids)):
            self.token_ids.append(token_ids[i])
            delta.token_ids.append(token_ids[i])
            if i < len(logprobs):
                delta.logprobs.append(logprobs[i])
            # The token that stops the output is one of its ids, but not of its text.
            if token_ids[i] not in self._stop_ids:
                delta.text += self._visible(self._detokenizer.push(token_ids[i]))
            if self._matcher.stopped:
                self.stopped_by_text = True
                break
        if delta.token_ids:
            self.last_token_s = time.monotonic()
            self.first_token_s = self.first_token_s or self.last_token_s
        return delta

    def end(self, reason: FinishReason) -> Delta:
        """The last delta, with what was held back."""
        delta = Delta(self.index, len(self.token_ids))
        if not self.stopped_by_text:
            delta.text = self._visible(self._detokenizer.flush())
            self.stopped_by_text = self._matcher.stopped
            delta.text += self._matcher.flush()
        self.finish = FinishReason.STOP if self.stopped_by_text else reason
        delta.finish = self.finish
        return delta

    @property
    def reached_end(self) -> FinishReason | None:
        """Why the tokens committed so far are the whole answer; None if more must follow.

        A verifier may be lost between an answer's last token and its finish.
        """
        stopped = bool(self.token_ids) and self.token_ids[-1] in self._stop_ids
        if self.stopped_by_text or (stopped and len(self.token_ids) > self._min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self._max_tokens else None

    def took_over(self, receipt: Receipt) -> None:
        """Accounts for a verifier's part of this choice."""
        self.receipt = self.receipt.merged(receipt) if self.has_receipt else receipt
        self.has_receipt = True

    def observe(self, job: Job, arrival_s: float, dispatch_s: float, predicted: LatencyMs) -> None:
        """Completes the receipt with what the gateway's clock saw."""
        now = time.monotonic()
        first, last = self.first_token_s or now, self.last_token_s or now
        tokens = len(self.token_ids)
        self.receipt = replace(
            self.receipt,
            request_id=job.request_id,
            model=job.model,
            seed=job.sampling.seed or 0,
            resumes=self.resumes,
            predicted=predicted if predicted.e2e_ms > 0 else self.receipt.predicted,
            observed=LatencyMs(
                queue_ms=1e3 * (dispatch_s - arrival_s),
                ttft_ms=1e3 * (first - arrival_s),
                tpot_ms=1e3 * (last - first) / (tokens - 1) if tokens > 1 else 0.0,
                e2e_ms=1e3 * (now - arrival_s),
            ),
        )
        self.terms = replace(self.terms, queue=dispatch_s - arrival_s)

    def _visible(self, text: str) -> str:
        # As in vLLM, stop strings count only after min_tokens.
        return self._matcher.push(text) if len(self.token_ids) > self._min_tokens else text


class GatewayRequest:
    """A request from its admission to its one terminal event."""

    def __init__(self, job: Job, codec: TextCodec, arrival_s: float) -> None:
        self.job = job
        self.arrival_s = arrival_s
        self.dispatch_s = arrival_s
        self.queued_s = arrival_s
        self.queued = False
        """In the queue, neither granted nor on its way there."""
        self.choices = [Choice(i, job, codec) for i in range(job.sampling.n)]
        self.predicted = LatencyMs()
        self.epoch = 0
        self.call_epoch = 0
        self.verifier_id = ""
        self.losses = 0
        self.refusals = 0
        self.error: PacelineError | None = None
        self.closed = False
        self._pending: list[Delta] = []
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Every choice ended, or the request failed."""
        return self.error is not None or all(choice.finish is not None for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def served_tokens(self) -> int:
        """In the unit of the admission estimate: every choice counts the prompt."""
        return len(self.choices) * len(self.job.prompt_token_ids) + self.completion_tokens

    @property
    def cached_tokens(self) -> int:
        return max((choice.cached_tokens for choice in self.choices), default=0)

    def put(self, delta: Delta) -> None:
        """Hands output to the client's side; joined to what it has not taken yet."""
        last = self._pending[-1] if self._pending else None
        if last is not None and last.choice == delta.choice and last.finish is None:
            last.text += delta.text
            last.token_ids += delta.token_ids
            last.logprobs += delta.logprobs
            last.finish = delta.finish
        elif delta.text or delta.token_ids or delta.finish is not None:
            self._pending.append(delta)
        self._changed.set()

    def fail(self, error: PacelineError) -> None:
        """The terminal event of a request that cannot be completed."""
        if not self.finished:
            self.error = error
        self._changed.set()

    async def deltas(self) -> list[Delta]:
        """Output that came since the last call, at least one; empty once every choice ended.

        Raises:
            PacelineError: the request failed; what came before was returned.
        """
        while True:
            if self._pending:
                pending, self._pending = self._pending, []
                return pending
            if self.error is not None:
                raise self.error
            if self.finished:
                return []
            self._changed.clear()
            await self._changed.wait()
