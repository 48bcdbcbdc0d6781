"""One running choice: its sequence, receipt, rounds, times, and what its reader still has to take."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from paceline.core.control import DraftDecision
from paceline.core.errors import PacelineError
from paceline.core.noise import Domain, noise_key
from paceline.core.types import (
    FinishReason,
    LatencyMs,
    Receipt,
    RoundRecord,
    SloClass,
    SpeculationOptions,
    TermSeconds,
    TokenLogprobs,
    Usage,
)
from paceline.engine.step import ItemResult, Sequence
from paceline.verifier.rounds import Inbox, Outcome, PrefixHashes

MAX_ROUND_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class Started:
    cached_tokens: int


@dataclass(slots=True)
class Committed:
    """``offset`` counts in the choice's output, resumed tokens included."""

    offset: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    receipt: Receipt
    rounds: tuple[RoundRecord, ...]
    terms: TermSeconds


Event = Started | Committed | Finished


class Outbox:
    """Events of one choice for its reader. Tokens not taken yet grow one event, so that a slow reader costs
    no more than its tokens; nobody ever waits for it."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._error: PacelineError | None = None
        self._news = asyncio.Event()

    def put(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Committed) and isinstance(last, Committed):
            last.token_ids += event.token_ids
            last.logprobs += event.logprobs
        else:
            self._events.append(event)
        self._news.set()

    def fail(self, error: PacelineError) -> None:
        """Ends the events with an error, after those not taken yet."""
        self._error = error
        self._news.set()

    async def get(self) -> Event:
        """The next event; raises the error that ended them."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()


@dataclass(slots=True)
class Times:
    """Readings of one monotonic clock, in seconds."""

    arrived_s: float
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    prefill_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    network_s: float = 0.0


class Choice:
    """Owned by the step loop; links add proposals to ``inbox``.

    Args:
        stop_ids: ids that end the choice.
    """

    def __init__(
        self,
        *,
        request_id: str,
        choice_index: int,
        grant_epoch: int,
        sequence: Sequence,
        stop_ids: frozenset[int],
        speculation: SpeculationOptions,
        slo_class: SloClass,
        receipt: Receipt,
        vocab_size: int,
        now_s: float,
    ) -> None:
        self.request_id = request_id
        self.choice_index = choice_index
        self.grant_epoch = grant_epoch
        self.sequence = sequence
        self.stop_ids = stop_ids
        self.speculation = speculation
        self.slo_class = slo_class
        self.receipt = receipt
        self.outbox = Outbox()
        self.session_id = secrets.randbits(64)
        self.session_gen = 0
        self.inbox = Inbox(receipt, sequence.tokens, vocab_size, PrefixHashes(sequence.tokens))
        self.decision = DraftDecision(0, "prompt")
        self.asked_tokens = 0
        self.waited_s = 0.0
        self.times = Times(now_s)
        self.rounds: deque[RoundRecord] = deque(maxlen=MAX_ROUND_RECORDS)
        self._key: int | None = None
        self._resumed_tokens = self.output_tokens
        self._round: tuple[int, int, str] = (0, 0, "")

    @property
    def output_tokens(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt_tokens

    @property
    def stops_from(self) -> int:
        """Index in the next block from which stop ids count."""
        return max(0, self.sequence.params.min_tokens - self.output_tokens)

    def synthetic_key(self) -> int:
        if self._key is None:
            prompt = self.sequence.tokens[: self.sequence.prompt_tokens]
            self._key = noise_key(self.receipt.seed, self.choice_index, prompt, Domain.SYNTHETIC)
        return self._key

    def begin_step(self, now_s: float) -> None:
        """The sequence is part of a step, perhaps for the first time."""
        if self.times.first_step_s is None:
            self.times.first_step_s = now_s
            self.outbox.put(Started(self.sequence.cached_tokens))

    def feed(self, draft: Tokens[int], *, drafter_lost: bool) -> None:
        """A round begins with this part of the pending proposal; notes why it is as long as it is."""
        reason = self.decision.reason
        if self.asked_tokens and not draft:
            if drafter_lost:
                reason = "no_drafter"
            elif not self.inbox.answers:
                reason = "late"
            else:
                reason = "stale" if self.inbox.arrived else "empty"
        self._round = (self.asked_tokens, self.inbox.arrived, reason)
        self.inbox.feed(len(draft))

    def begin_plain_round(self) -> None:
        """A round at the end of a prompt, which no proposal can be part of."""
        self._round = (0, 0, self.decision.reason if not self.decision.tokens else "prompt")

    def settle(self, outcome: Outcome, result: ItemResult, now_s: float) -> None:
        """Books an executed round; its tokens are in the sequence already."""
        receipt, asked_arrived_reason = self.receipt, self._round
        self.inbox.settled(outcome.verified)
        receipt.rounds += 1
        receipt.undrafted_rounds += outcome.verified == 0
        receipt.accepted_tokens += outcome.accepted
        by_position = receipt.accepted_by_position
        by_position += [0] * (outcome.verified - len(by_position))
        for position in range(outcome.accepted):
            by_position[position] += 1
        receipt.draft_length_histogram[outcome.verified] += 1
        receipt.wait_ms += self.waited_s * 1e3
        margins = result.margins[: len(outcome.new_tokens)]
        if margins:
            known = receipt.min_race_margin
            receipt.min_race_margin = min(margins) if known is None else min(known, *margins)
        asked, arrived, reason = asked_arrived_reason
        receipt.reasons[reason] += 1
        self.rounds.append(
            RoundRecord(outcome.verified, asked, arrived, outcome.accepted, self.waited_s * 1e3, reason)
        )
        self.waited_s = 0.0
        if self.times.first_token_s is None:
            self.times.first_token_s = now_s
        self.times.last_token_s = now_s
        count = len(outcome.new_tokens)
        logprobs = list((result.logprobs or [])[:count])
        self.outbox.put(Committed(self.output_tokens - count, outcome.new_tokens, logprobs))

    def finish(self, reason: FinishReason, stop_token_id: int | None, now_s: float) -> None:
        """The last event."""
        self.inbox.close()
        sequence, times = self.sequence, self.times
        self.receipt.observed = self.observed(now_s)
        first_step_s = times.first_step_s if times.first_step_s is not None else now_s
        self.outbox.put(
            Finished(
                reason,
                stop_token_id,
                Usage(sequence.prompt_tokens, self.output_tokens, sequence.cached_tokens),
                self.receipt,
                tuple(self.rounds),
                TermSeconds(
                    times.prefill_s,
                    times.draft_s,
                    times.verify_s,
                    times.network_s,
                    first_step_s - times.arrived_s,
                ),
            )
        )

    def fail(self, error: PacelineError) -> None:
        self.inbox.close()
        self.outbox.fail(error)

    def observed(self, now_s: float) -> LatencyMs:
        """By this process's own clock; TPOT over the tokens after the first."""
        times = self.times
        first_step_s = times.first_step_s if times.first_step_s is not None else now_s
        first_token_s = times.first_token_s if times.first_token_s is not None else now_s
        tokens = self.output_tokens - self._resumed_tokens - 1
        tpot_s = (times.last_token_s - first_token_s) / tokens if tokens > 0 else 0.0
        return LatencyMs(
            queue_ms=(first_step_s - times.arrived_s) * 1e3,
            ttft_ms=(first_token_s - times.arrived_s) * 1e3,
            tpot_ms=max(0.0, tpot_s) * 1e3,
            e2e_ms=(now_s - times.arrived_s) * 1e3,
        )
