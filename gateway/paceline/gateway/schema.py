"""Bodies of the OpenAI API: known fields validated, everything else refused by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from paceline.core.errors import ErrorKind, PacelineError, invalid
from paceline.core.params import validate
from paceline.core.types import SamplingParams, SpeculationMode, SpeculationOptions
from paceline.wire.settings import MAX_DRAFT_TOKENS

MAX_PROMPTS = 256
"""Prompts in one /v1/completions request."""
MAX_MESSAGES = 4096
_INT32_MAX = 2**31 - 1

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Parameters of OpenAI and vLLM that are not implemented, with the values that ask for nothing.
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": (None, []),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculation(_Body):
    enabled: bool | None = None
    max_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    mode: Literal["coupled", "rejection"] | None = None
    drafter: str | None = None
    receipt: bool | None = None

    def options(self) -> SpeculationOptions:
        if self.mode == "rejection":
            raise invalid("speculation.mode", "'rejection' is not supported yet, use 'coupled'")
        return SpeculationOptions(
            enabled=self.enabled is not False,
            max_draft_tokens=self.max_draft_tokens,
            mode=SpeculationMode.COUPLED,
            drafter=self.drafter or "",
            receipt=bool(self.receipt),
        )


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _bias(value: Any) -> Any:
    """JSON has string keys only; ids are decimal."""
    if not isinstance(value, Mapping):
        return value
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


_TEXTS_JSON = {"type": "array", "items": {"type": "string"}}
_IDS_JSON = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_STOP_JSON = {"anyOf": [{"type": "string"}, _TEXTS_JSON, {"type": "null"}]}
_PROMPT_JSON = {"anyOf": [{"type": "string"}, _TEXTS_JSON, _IDS_JSON, {"type": "array", "items": _IDS_JSON}]}
_PART_JSON = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT_JSON = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_JSON}]}


class Generation(_Body):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=_INT32_MAX)] | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stops), WithJsonSchema(_STOP_JSON)] = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_bias)] = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    speculation: Speculation | None = None
    priority: Annotated[int, Field(ge=-_INT32_MAX - 1, le=_INT32_MAX)] | None = None
    user: str | None = None
    service_tier: str | None = None

    def limit_tokens(self) -> int | None:
        return self.max_tokens

    @abstractmethod
    def top_count(self) -> int | None:
        """Top logprobs wanted a token; None for no logprobs."""

    def sampling(self, *, vocab_size: int, max_n: int) -> SamplingParams:
        """Raises PacelineError naming the field out of its limits."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream: true")
        params = SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            max_tokens=self.limit_tokens(),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.top_count(),
            n=1 if self.n is None else self.n,
        )
        return validate(params, vocab_size=vocab_size, max_n=max_n)

    def speculation_options(self) -> SpeculationOptions:
        return SpeculationOptions() if self.speculation is None else self.speculation.options()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _content(value: Any) -> Any:
    """Text parts are joined by newlines, as chat templates without parts expect."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError("only parts of type 'text' are supported")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError("a text part has the fields type and text, a string")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT_JSON)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None

    def for_template(self) -> dict[str, str]:
        # `developer` is OpenAI's newer name of the system role; templates know the older one.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatBody(Generation):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def limit_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_completion_tokens", "must equal max_tokens when both are given")
        if self.max_completion_tokens < 1:
            raise invalid("max_completion_tokens", "must be at least 1")
        return self.max_completion_tokens

    def top_count(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise invalid("top_logprobs", "needs logprobs: true")
            return None
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise invalid("top_logprobs", "must be from 0 to 20")
        return self.top_logprobs or 0


Prompt = str | list[int]


def _prompts(value: Any) -> Any:
    """One prompt or several, each text or token ids, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, token ids, or a list of either, and not empty")
    if all(type(item) is int for item in value):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts")
    for item in value:
        if not isinstance(item, str) and not (
            isinstance(item, list) and item and all(type(token) is int for token in item)
        ):
            raise ValueError("must be a string, token ids, or a list of either, and not empty")
    return value


class CompletionBody(Generation):
    prompt: Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(_PROMPT_JSON)]
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self.prompt
        return prompts

    def top_count(self) -> int | None:
        if self.echo and self.logprobs is not None:
            raise invalid("echo", "is not supported together with logprobs")
        return self.logprobs


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[int]


BodyT = TypeVar("BodyT", bound=_Body)


def parse(model: type[BodyT], value: Any) -> BodyT:
    """``value`` as the body; raises PacelineError naming the first field that is wrong."""
    if not isinstance(value, dict):
        raise PacelineError(ErrorKind.INVALID_ARGUMENT, "the body must be a JSON object")
    known = model.model_fields
    fields = {}
    for name, field_value in value.items():
        if name in _UNSUPPORTED and name not in known:
            if not any(
                type(field_value) is type(harmless) and field_value == harmless
                for harmless in _UNSUPPORTED[name]
            ):
                raise invalid(name, "is not supported")
            continue
        if name not in known:
            raise invalid(name, "is not a known parameter")
        fields[name] = field_value
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise invalid(path, _reason(first["type"], first["msg"])) from None


def _reason(kind: str, message: str) -> str:
    known = {"missing": "is required", "extra_forbidden": "is not a known parameter"}
    return known.get(kind, message.removeprefix("Value error, ")[:300])
