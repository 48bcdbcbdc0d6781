"""The OpenAI API over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import metadata

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline.core.errors import PacelineError, invalid
from paceline.core.types import TokenLogprobs
from paceline.gateway import schema
from paceline.gateway.endpoint import Call, Endpoint, Handler, http_error, paceline_error
from paceline.gateway.openapi import document
from paceline.gateway.responses import ChatFormat, CompletionFormat, Format
from paceline.gateway.service import Gateway, Session
from paceline.gateway.streaming import frames, merged


class OpenAiApi:
    """Handlers of all endpoints."""

    def __init__(self, gateway: Gateway, registry: CollectorRegistry) -> None:
        self._gateway = gateway
        self._registry = registry

    def app(self) -> Starlette:
        def post(path: str, handler: Handler) -> Route:
            return Route(path, Endpoint(self._gateway, handler), methods=["POST"])

        return Starlette(
            routes=[
                post("/v1/chat/completions", self._chat),
                post("/v1/completions", self._completions),
                post("/tokenize", self._tokenize),
                post("/detokenize", self._detokenize),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._one_model),
                Route("/health", self._alive),
                Route("/liveness", self._alive),
                Route("/readiness", self._ready),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/openapi.json", self._openapi),
            ],
            exception_handlers={HTTPException: http_error, PacelineError: paceline_error},
        )

    async def _chat(self, call: Call) -> None:
        gateway = self._gateway
        body = schema.parse(schema.ChatBody, call.body)
        gateway.check_model(body.model)
        async with gateway.session(call.id, 1, self._choices(body)) as session:
            text = gateway.codec.render(
                [message.for_template() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt is not False
                and not body.continue_final_message,
                continue_final_message=bool(body.continue_final_message),
            )
            ids = await gateway.codec.encode(text, add_special_tokens=False, field="messages")
            await self._submit(call, session, body, [ids], "messages")
            await self._deliver(call, body, session, ChatFormat, ())

    async def _completions(self, call: Call) -> None:
        gateway = self._gateway
        body = schema.parse(schema.CompletionBody, call.body)
        gateway.check_model(body.model)
        prompts = body.prompts()
        async with gateway.session(call.id, len(prompts), self._choices(body)) as session:
            encoded, echoed = [], []
            for prompt in prompts:
                if isinstance(prompt, str):
                    ids = await gateway.codec.encode(prompt, add_special_tokens=True, field="prompt")
                else:
                    ids = prompt
                    gateway.codec.check_ids(ids, "prompt")
                encoded.append(ids)
                if body.echo:
                    echoed.append(prompt if isinstance(prompt, str) else gateway.codec.decode(ids))
            await self._submit(call, session, body, encoded, "prompt")
            await self._deliver(call, body, session, CompletionFormat, echoed)

    def _choices(self, body: schema.Generation) -> int:
        """All checks that need no prompt, before a slot is taken; the number of choices."""
        gateway = self._gateway
        sampling = body.sampling(vocab_size=gateway.codec.vocab_size, max_n=gateway.settings.gateway.max_n)
        gateway.check_speculation(body.speculation_options())
        return sampling.n

    async def _submit(
        self,
        call: Call,
        session: Session,
        body: schema.Generation,
        prompts: Sequence[Sequence[int]],
        field: str,
    ) -> None:
        gateway = self._gateway
        header = call.headers.get("x-paceline-class", "")
        tier = body.service_tier or ""
        name, name_field = (header, "x-paceline-class") if header else (tier, "service_tier")
        if name_field == "service_tier" and name in ("auto", "default"):
            name = ""
        slo = gateway.slo_class(name, name_field)
        sampling = body.sampling(vocab_size=gateway.codec.vocab_size, max_n=gateway.settings.gateway.max_n)
        jobs = [
            gateway.job(
                job_id,
                ids,
                sampling,
                body.speculation_options(),
                slo,
                field=field,
                priority=body.priority,
                caller_timeout_s=call.caller_timeout_s,
            )
            for job_id, ids in zip(session.ids, prompts, strict=True)
        ]
        for job in jobs:
            await session.submit(job)

    async def _deliver(
        self,
        call: Call,
        body: schema.Generation,
        session: Session,
        make: type[Format],
        echoed: Sequence[str],
    ) -> None:
        form = make(
            self._gateway,
            session,
            call.id,
            logprobs=body.top_count(),
            token_ids=bool(body.return_token_ids),
            receipt=body.speculation_options().receipt,
            include_usage=body.include_usage,
            usage_in_every_chunk=body.usage_in_every_chunk,
            echoed=echoed,
        )
        if body.stream:
            await call.exchange.stream(frames(session, form))
            return
        texts: dict[int, str] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        async for _, index, delta in merged(session):
            texts[index] = texts.get(index, "") + delta.text
            logprobs.setdefault(index, []).extend(delta.logprobs)
        await call.exchange.json(form.whole(texts, logprobs))

    async def _tokenize(self, call: Call) -> None:
        body = schema.parse(schema.TokenizeBody, call.body)
        codec = self._gateway.codec
        if body.model is not None:
            self._gateway.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            text = codec.render(
                [message.for_template() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt is not False
                and not body.continue_final_message,
                continue_final_message=bool(body.continue_final_message),
            )
            ids = await codec.encode(text, add_special_tokens=bool(body.add_special_tokens), field="messages")
        else:
            ids = await codec.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False, field="prompt"
            )
        await call.exchange.json(
            {"count": len(ids), "max_model_len": self._gateway.fleet.max_context_tokens, "tokens": ids}
        )

    async def _detokenize(self, call: Call) -> None:
        body = schema.parse(schema.DetokenizeBody, call.body)
        if body.model is not None:
            self._gateway.check_model(body.model)
        self._gateway.codec.check_ids(body.tokens, "tokens")
        text = await asyncio.to_thread(self._gateway.codec.decode, body.tokens, skip_special_tokens=False)
        await call.exchange.json({"prompt": text})

    def _card(self) -> dict[str, object]:
        return {
            "id": self._gateway.model,
            "object": "model",
            "created": self._gateway.created_s,
            "owned_by": "paceline",
            "max_model_len": self._gateway.fleet.max_context_tokens,
        }

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Response:
        self._gateway.check_model(request.path_params["model"])
        return JSONResponse(self._card())

    async def _alive(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        if self._gateway.accepting:
            return JSONResponse({"status": "ready"})
        status = "draining" if self._gateway.draining else "no verifier"
        return JSONResponse({"status": status}, status_code=503, headers={"retry-after": "1"})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": metadata.version("paceline")})

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(document(self._gateway.model))

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
