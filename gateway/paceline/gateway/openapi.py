"""The HTTP API's own description (OpenAPI 3.1), made from the models that validate the bodies."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatBody, "One chat completion; an event stream with stream: true."),
    "/v1/completions": (CompletionBody, "Completions of one or more prompts."),
    "/tokenize": (TokenizeBody, "Token ids of a prompt or of chat messages."),
    "/detokenize": (DetokenizeBody, "Text of token ids."),
}
_VIEWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "/v1/models": ("The served models.", ("200",)),
    "/health": ("The process runs.", ("200",)),
    "/liveness": ("The process runs.", ("200",)),
    "/readiness": ("Requests are accepted.", ("200", "503")),
    "/version": ("Paceline's version.", ("200",)),
}
_ERRORS = {
    "400": "A wrong, unknown or unsupported parameter, or a prompt over the context.",
    "404": "The model is not served.",
    "409": "The request id is in use.",
    "413": "The body is too large.",
    "429": "The queue is full.",
    "503": "Draining, or no verifier answers, or the wait in the queue is over.",
    "504": "The caller's deadline passed.",
}
_TEXT_OR_NULL = {"type": ["string", "null"]}
# Of each event of a stream: a chunk as JSON, or [DONE].
_EVENT_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": {"type": "string"},
            },
        }
    },
}


def document(model: str) -> dict[str, Any]:
    """The document served at ``/openapi.json`` for one served model."""
    inputs: list[tuple[type[BaseModel], Any]] = [(body, "validation") for body, _ in _BODIES.values()]
    _, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = definitions["$defs"]
    for body, _ in _BODIES.values():
        # A request for another model is refused; null is only allowed where model is optional.
        named = schemas[body.__name__]["properties"]["model"]
        named.clear()
        named["enum"] = [model] if "model" in schemas[body.__name__].get("required", ()) else [model, None]
    schemas["Error"] = _ERROR_SCHEMA
    paths: dict[str, Any] = {path: {"post": _post(*body)} for path, body in _BODIES.items()}
    for path, (summary, codes) in _VIEWS.items():
        paths[path] = {"get": {"summary": summary, "responses": {code: _json() for code in codes}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": metadata.version("paceline")},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _post(body: type[BaseModel], summary: str) -> dict[str, Any]:
    answer = _json()
    answer["content"]["text/event-stream"] = {"schema": _EVENT_SCHEMA}
    errors = {
        code: {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for code, text in _ERRORS.items()
    }
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": {"200": answer, **errors},
    }


def _json() -> dict[str, Any]:
    return {"description": "The answer.", "content": {"application/json": {"schema": {"type": "object"}}}}
