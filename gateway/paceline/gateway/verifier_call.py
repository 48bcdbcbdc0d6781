"""One choice on one verifier: the call, its events, and what a broken one means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from paceline.core.errors import ErrorKind, PacelineError
from paceline.core.types import FinishReason, Receipt
from paceline.gateway.fleet import WorkerLink
from paceline.gateway.request import Choice, Delta, GatewayRequest
from paceline.v1 import verifier_pb2
from paceline.wire.convert import (
    finish_reason_from_proto,
    receipt_from_proto,
    round_records_from_proto,
    sampling_to_proto,
    slo_class_to_proto,
    speculation_to_proto,
    term_seconds_from_proto,
    token_logprobs_from_proto,
)
from paceline.wire.status import DETAILS_KEY, from_rpc_error

WIND_DOWN_S = 2.0
"""Longest wait for the receipt of a choice that a stop string ended."""
_CUT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)


class LostError(Exception):
    """The verifier or its connection is gone; the choice continues elsewhere."""


class RefusedError(Exception):
    """The verifier did not take the choice now."""


async def generate(
    link: WorkerLink, request: GatewayRequest, choice: Choice, deliver: Callable[[Delta], None]
) -> FinishReason:
    """Runs the rest of ``choice`` on a verifier; every new piece of output goes to ``deliver``.

    Raises:
        LostError, RefusedError: to be tried again elsewhere.
        PacelineError: the verifier's own typed error.
    """
    started: Receipt | None = None
    with link.tracked(link.verifier.Generate(_message(request, choice))) as call:
        try:
            async for response in call:
                event = response.WhichOneof("event")
                if event == "started":
                    started = _begun(link, choice, response.started)
                elif event == "tokens":
                    tokens = response.tokens
                    logprobs = [token_logprobs_from_proto(m) for m in tokens.logprobs]
                    deliver(choice.commit(tokens.offset, tokens.token_ids, logprobs))
                    if choice.stopped_by_text:
                        await _wind_down(link, request, choice, call)
                        return FinishReason.STOP
                elif event == "finished":
                    reason = finish_reason_from_proto(response.finished.reason)
                    _take(choice, response.finished)
                    started = None
                    if reason is FinishReason.CANCELLED:
                        raise LostError("the verifier ended the work")
                    return reason
            raise LostError("the stream ended without its finish event")
        except grpc.aio.AioRpcError as error:
            _account(choice, started)
            raise _failure(error, begun=started is not None) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: the link found its worker lost.
            _account(choice, started)
            raise LostError("connection lost") from None


def _message(request: GatewayRequest, choice: Choice) -> verifier_pb2.VerifierGenerateRequest:
    job = request.job
    return verifier_pb2.VerifierGenerateRequest(
        request_id=job.request_id,
        choice_index=choice.index,
        model=job.model,
        prompt_token_ids=job.prompt_token_ids,
        committed_token_ids=choice.token_ids,
        # Stop strings are the gateway's; they may hold what protobuf strings cannot.
        sampling=sampling_to_proto(replace(job.sampling, stop=(), n=1)),
        speculation=speculation_to_proto(job.speculation),
        slo_class=slo_class_to_proto(job.slo),
        tenant=job.tenant,
        grant_epoch=request.call_epoch,
    )


def _begun(link: WorkerLink, choice: Choice, started: verifier_pb2.GenerateStarted) -> Receipt:
    if choice.begun:
        choice.resumes += 1
    else:
        choice.cached_tokens = started.cached_tokens
    choice.begun = True
    # Stands for the verifier's own receipt should it be lost before it sends one.
    return Receipt(exact=link.exact, verifiers=[started.verifier_id or link.id])


def _take(choice: Choice, finished: verifier_pb2.GenerateFinished) -> None:
    choice.took_over(receipt_from_proto(finished.receipt))
    choice.rounds += round_records_from_proto(finished.rounds)
    choice.terms = choice.terms + term_seconds_from_proto(finished.terms)


def _account(choice: Choice, started: Receipt | None) -> None:
    if started is not None:
        choice.took_over(started)


async def _wind_down(link: WorkerLink, request: GatewayRequest, choice: Choice, call: Any) -> None:
    """Ends a choice that is complete for the client, and waits for its receipt a little.

    Whatever goes wrong here costs the receipt's figures only.
    """
    abort = link.verifier.Abort(
        verifier_pb2.AbortRequest(request_id=request.job.request_id, choice_index=choice.index),
        timeout=WIND_DOWN_S,
    )
    try:
        async with asyncio.timeout(WIND_DOWN_S):
            await abort
            async for response in call:
                if response.WhichOneof("event") == "finished":
                    _take(choice, response.finished)
                    return
    except (TimeoutError, grpc.aio.AioRpcError):
        return
    finally:
        abort.cancel()


def _failure(error: grpc.aio.AioRpcError, *, begun: bool) -> Exception:
    typed = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    failure = from_rpc_error(error)
    if typed:
        if failure.kind in (ErrorKind.UNAVAILABLE, ErrorKind.OVERLOADED) and not begun:
            return RefusedError(failure.message)
        if failure.kind in (ErrorKind.UNAVAILABLE, ErrorKind.CANCELLED):
            return LostError(failure.message)
        return failure
    if error.code() in _CUT:
        return LostError(error.details() or error.code().name)
    return PacelineError(failure.kind, failure.message, field=failure.field)
