"""The public gRPC API, on the same path as HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paceline.core.errors import invalid
from paceline.core.types import SpeculationMode
from paceline.gateway.request import Delta, GatewayRequest
from paceline.gateway.service import Gateway, request_id
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.convert import (
    finish_reason_to_proto,
    receipt_to_proto,
    sampling_from_proto,
    speculation_from_proto,
    token_logprobs_to_proto,
    usage_to_proto,
)
from paceline.wire.settings import MAX_DRAFT_TOKENS

SERVICE = "paceline.v1.Inference"
_ROLES = ("system", "developer", "user", "assistant")


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Errors are PacelineError; the server's interceptor gives them their status."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        gateway = self._gateway
        call_id = request_id(request.request_id, "request_id")
        gateway.check_model(request.model)
        sampling = sampling_from_proto(
            request.sampling, vocab_size=gateway.codec.vocab_size, max_n=gateway.settings.gateway.max_n
        )
        speculation = speculation_from_proto(request.speculation)
        if speculation.mode is SpeculationMode.REJECTION:
            raise invalid("speculation.mode", "rejection is not supported yet, use coupled")
        if (speculation.max_draft_tokens or 0) > MAX_DRAFT_TOKENS:
            raise invalid("speculation.max_draft_tokens", f"must be at most {MAX_DRAFT_TOKENS}")
        gateway.check_speculation(speculation)
        slo = gateway.slo_class(request.slo_class, "slo_class")
        async with gateway.session(call_id, 1, sampling.n) as session:
            ids, field = await self._encode(request)
            job = gateway.job(
                call_id,
                ids,
                sampling,
                speculation,
                slo,
                field=field,
                caller_timeout_s=context.time_remaining(),
            )
            running = await session.submit(job)
            left = len(running.choices)
            while deltas := await running.deltas():
                for delta in deltas:
                    left -= delta.finish is not None
                    response = _response(running, delta)
                    if left == 0 and delta.finish is not None:
                        response.usage.CopyFrom(usage_to_proto(session.usage()))
                    yield response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        if request.model:
            self._gateway.check_model(request.model)
        ids, _ = await self._encode(request)
        return inference_pb2.TokenizeResponse(
            token_ids=ids, max_context_tokens=self._gateway.fleet.max_context_tokens
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        card = inference_pb2.ModelCard(
            id=self._gateway.model, max_context_tokens=self._gateway.fleet.max_context_tokens
        )
        return inference_pb2.ListModelsResponse(models=[card])

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: Any
    ) -> inference_pb2.CancelResponse:
        return inference_pb2.CancelResponse(cancelled=self._gateway.cancel(request.request_id))

    async def _encode(
        self, request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
    ) -> tuple[list[int], str]:
        """Prompt ids, and the field they come from."""
        codec = self._gateway.codec
        source = request.WhichOneof("input")
        if source == "messages":
            messages = request.messages.messages
            if not messages:
                raise invalid("messages", "must not be empty")
            if any(message.role not in _ROLES for message in messages):
                raise invalid("messages.role", f"must be one of: {', '.join(_ROLES)}")
            text = codec.render(
                [
                    {"role": "system" if m.role == "developer" else m.role, "content": m.content}
                    for m in messages
                ]
            )
            return await codec.encode(text, add_special_tokens=False, field="messages"), "messages"
        if source == "token_ids" and isinstance(request, inference_pb2.GenerateRequest):
            ids = list(request.token_ids.ids)
            codec.check_ids(ids, "token_ids")
            return ids, "token_ids"
        if source == "prompt":
            return await codec.encode(request.prompt, add_special_tokens=True, field="prompt"), "prompt"
        raise invalid("input", "one of prompt, token_ids and messages is required")


def _response(request: GatewayRequest, delta: Delta) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=request.job.request_id,
        choice_index=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=[token_logprobs_to_proto(value) for value in delta.logprobs],
    )
    if delta.finish is not None:
        response.finish_reason = finish_reason_to_proto(delta.finish)
        if request.job.speculation.receipt:
            choice = request.choices[delta.choice]
            response.speculation.CopyFrom(receipt_to_proto(choice.receipt))
    return response
