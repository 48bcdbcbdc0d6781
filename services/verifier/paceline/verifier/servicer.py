"""The Verifier service: checks requests, hands choices to the step loop, streams what it commits."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from paceline.core.control import predicted_latency
from paceline.core.errors import ErrorKind, PacelineError, invalid
from paceline.core.noise import Domain, noise_key
from paceline.core.types import Receipt, SpeculationMode
from paceline.engine.step import Runner, Sequence
from paceline.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.verifier.choice import Choice, Committed, Event, Started
from paceline.verifier.drafting import Drafting
from paceline.verifier.steps import StepLoop
from paceline.wire.convert import (
    finish_reason_to_proto,
    receipt_to_proto,
    round_records_to_proto,
    sampling_from_proto,
    slo_class_from_proto,
    speculation_from_proto,
    term_seconds_to_proto,
    token_logprobs_to_proto,
    usage_to_proto,
)

MAX_REQUEST_ID_CHARACTERS = 128
MAX_KNOWN_EPOCHS = 4096

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Served:
    """What this verifier serves and how. ``chunk_tokens``: longest prefill chunk."""

    verifier_id: str
    incarnation: int
    model: str
    exact: bool
    stall_timeout_s: float
    chunk_tokens: int


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    """One `Generate` call is one choice, whatever its ``sampling.n``."""

    def __init__(
        self, served: Served, runner: Runner, steps: StepLoop, drafting: Drafting, clock: Callable[[], float]
    ) -> None:
        self.accepting = True
        self._served = served
        self._runner = runner
        self._steps = steps
        self._drafting = drafting
        self._clock = clock
        self._ids = count(1)
        self._live: dict[Key, Choice] = {}
        self._epochs: OrderedDict[Key, int] = OrderedDict()
        self._fail_next: set[str] = set()

    def fail_next(self, request_id: str) -> None:
        """Testing: the next logits of this request, running or to come, are not finite."""
        live = [choice for choice in self._live.values() if choice.request_id == request_id]
        for choice in live:
            self._runner.fail_next(choice.sequence.id)
        if not live:
            self._fail_next.add(request_id)

    async def Generate(
        self, request: verifier_pb2.VerifierGenerateRequest, context: Any
    ) -> AsyncIterator[verifier_pb2.VerifierGenerateResponse]:
        choice = self._choice(request)
        key = (choice.request_id, choice.choice_index)
        self._fence(key, choice.grant_epoch)
        self._steps.submit(choice)
        self._predict(choice)
        self._live[key] = choice
        if choice.request_id in self._fail_next:
            self._fail_next.discard(choice.request_id)
            self._runner.fail_next(choice.sequence.id)
        try:
            while True:
                event = await choice.outbox.get()
                response = self._to_proto(event)
                # Written here and not yielded, so that a reader that takes nothing can be cut.
                await self._write(context, response)
                if response.HasField("finished"):
                    return
        finally:
            self._steps.leave(choice)
            if self._live.get(key) is choice:
                del self._live[key]
        yield  # makes this an async generator, as the server expects of a stream

    async def Abort(self, request: verifier_pb2.AbortRequest, context: Any) -> verifier_pb2.AbortResponse:
        choices = [
            choice
            for choice in self._live.values()
            if choice.request_id == request.request_id
            and (not request.HasField("choice_index") or choice.choice_index == request.choice_index)
        ]
        for choice in choices:
            self._steps.cancel(choice)
        return verifier_pb2.AbortResponse(aborted=len(choices))

    async def _write(self, context: Any, response: verifier_pb2.VerifierGenerateResponse) -> None:
        timeout_s = self._served.stall_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await context.write(response)
        except TimeoutError:
            raise PacelineError(
                ErrorKind.CANCELLED, f"the stream was not read for {timeout_s:g} s (gateway.stall_timeout_s)"
            ) from None

    def _fence(self, key: Key, epoch: int) -> None:
        """Lets one grant at a time run a choice: older ones are refused, a newer one replaces."""
        newest = self._epochs.get(key, 0)
        if epoch < newest:
            raise PacelineError(
                ErrorKind.FAILED_PRECONDITION,
                f"grant_epoch: {epoch} is older than {newest}, which was seen here",
                field="grant_epoch",
            )
        running = self._live.get(key)
        if running is not None:
            if running.grant_epoch == epoch:
                raise PacelineError(
                    ErrorKind.ALREADY_EXISTS, f"request_id: {key[0]} choice {key[1]} runs", field="request_id"
                )
            error = PacelineError(ErrorKind.CANCELLED, f"grant_epoch: replaced by grant {epoch}")
            self._steps.fail(running, error)
        self._epochs[key] = epoch
        self._epochs.move_to_end(key)
        while len(self._epochs) > MAX_KNOWN_EPOCHS:
            self._epochs.popitem(last=False)

    def _choice(self, request: verifier_pb2.VerifierGenerateRequest) -> Choice:
        """The checked request. Raises PacelineError naming the field."""
        served, runner = self._served, self._runner
        if not self.accepting:
            raise PacelineError(ErrorKind.UNAVAILABLE, "verifier: draining", retry_after_s=1.0)
        if request.model != served.model:
            raise PacelineError(
                ErrorKind.MODEL_NOT_FOUND, f"model: {request.model!r} is not served here", field="model"
            )
        if not 0 < len(request.request_id) <= MAX_REQUEST_ID_CHARACTERS:
            raise invalid("request_id", f"must have 1 to {MAX_REQUEST_ID_CHARACTERS} characters")
        params = sampling_from_proto(request.sampling, vocab_size=runner.vocab_size)
        speculation = speculation_from_proto(request.speculation)
        if speculation.mode is SpeculationMode.REJECTION:
            raise invalid("speculation.mode", "must be coupled; rejection is not available")
        self._drafting.check_drafter(speculation.drafter)
        prompt, committed = list(request.prompt_token_ids), list(request.committed_token_ids)
        if not prompt:
            raise invalid("prompt_token_ids", "must not be empty")
        _check_vocabulary("prompt_token_ids", prompt, runner.vocab_size)
        _check_vocabulary("committed_token_ids", committed, runner.vocab_size)
        left = self._steps.scheduler.max_context_tokens - len(prompt)
        if left - len(committed) < 1:
            raise PacelineError(
                ErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"prompt_token_ids: {len(prompt) + len(committed)} tokens leave no room in a context of "
                f"{self._steps.scheduler.max_context_tokens}",
                field="prompt_token_ids",
            )
        max_tokens = min(left, params.max_tokens or left)
        if len(committed) >= max_tokens:
            raise invalid("committed_token_ids", f"must be fewer than max_tokens ({max_tokens})")
        seed = secrets.randbits(53) if params.seed is None else params.seed
        params = replace(params, seed=seed, max_tokens=max_tokens)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= runner.eos_token_ids
        return Choice(
            request_id=request.request_id,
            choice_index=request.choice_index,
            grant_epoch=request.grant_epoch,
            sequence=Sequence(
                id=next(self._ids),
                tokens=[*prompt, *committed],
                prompt_tokens=len(prompt),
                params=params,
                noise_key=noise_key(seed, request.choice_index, prompt, Domain.TARGET),
                stop_ids=stop_ids,
            ),
            stop_ids=stop_ids,
            speculation=speculation,
            slo_class=slo_class_from_proto(request.slo_class),
            receipt=Receipt(
                request_id=request.request_id,
                model=served.model,
                seed=seed,
                exact=served.exact,
                verifiers=[served.verifier_id],
                resumes=1 if committed else 0,
            ),
            vocab_size=runner.vocab_size,
            now_s=self._clock(),
        )

    def _predict(self, choice: Choice) -> None:
        """What the drafter's last plan gives for an admitted choice."""
        plan = self._drafting.plan(choice)
        if plan is not None:
            steps = self._steps.scheduler
            choice.receipt.predicted = predicted_latency(
                plan,
                running=steps.running,
                prompt_tokens=len(choice.sequence.tokens),
                output_tokens=steps.room(choice.sequence),
                chunk_tokens=self._served.chunk_tokens,
            )

    def _to_proto(self, event: Event) -> verifier_pb2.VerifierGenerateResponse:
        if isinstance(event, Started):
            started = verifier_pb2.GenerateStarted(
                verifier_id=self._served.verifier_id,
                worker_incarnation=self._served.incarnation,
                cached_tokens=event.cached_tokens,
            )
            return verifier_pb2.VerifierGenerateResponse(started=started)
        if isinstance(event, Committed):
            tokens = verifier_pb2.CommittedTokens(
                offset=event.offset,
                token_ids=event.token_ids,
                logprobs=[token_logprobs_to_proto(value) for value in event.logprobs],
            )
            return verifier_pb2.VerifierGenerateResponse(tokens=tokens)
        finished = verifier_pb2.GenerateFinished(
            reason=finish_reason_to_proto(event.reason),
            usage=usage_to_proto(event.usage),
            receipt=receipt_to_proto(event.receipt),
            rounds=round_records_to_proto(event.rounds),
            terms=term_seconds_to_proto(event.terms),
        )
        if event.stop_token_id is not None:
            finished.stop_token_id = event.stop_token_id
        return verifier_pb2.VerifierGenerateResponse(finished=finished)


def _check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    foreign = next((t for t in token_ids if t >= vocab_size), None)
    if foreign is not None:
        raise invalid(field, f"token id {foreign} must be below the vocabulary's size ({vocab_size})")
