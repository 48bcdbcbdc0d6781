"""Bodies and chunks of OpenAI's two generation endpoints."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from paceline.core.types import TokenLogprobs, Usage
from paceline.gateway.request import Delta, GatewayRequest
from paceline.gateway.service import Gateway, Session

JSON = dict[str, Any]


def usage_json(usage: Usage) -> JSON:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def receipts(requests: Sequence[GatewayRequest]) -> JSON | list[JSON]:
    """The receipt of the only choice, or a list by choice."""
    all_receipts = [choice.receipt.to_json() for r in requests for choice in r.choices]
    return all_receipts[0] if len(all_receipts) == 1 else all_receipts


class Format(ABC):
    """How one call's output is written; the endpoints differ in where text and logprobs go.

    Args:
        echoed: by prompt, text put before the output.
    """

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(
        self,
        gateway: Gateway,
        session: Session,
        call_id: str,
        *,
        logprobs: int | None,
        token_ids: bool,
        receipt: bool,
        include_usage: bool = False,
        usage_in_every_chunk: bool = False,
        echoed: Sequence[str] = (),
    ) -> None:
        self._codec = gateway.codec
        self._session = session
        self._base = {
            "id": f"{self.prefix}{call_id}",
            "created": int(time.time()),
            "model": gateway.model,
            "system_fingerprint": gateway.system_fingerprint,
        }
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._receipt = receipt
        self._include_usage = include_usage
        self._usage_in_every_chunk = usage_in_every_chunk
        self._echoed = echoed

    def whole(self, texts: dict[int, str], logprobs: dict[int, list[TokenLogprobs]]) -> JSON:
        """The answer to a call without streaming; texts and logprobs by choice index."""
        choices = []
        for prompt, request in enumerate(self._session.requests):
            for choice in request.choices:
                index = prompt * len(request.choices) + choice.index
                body = self._whole_choice(prompt, texts.get(index, ""))
                body.update(
                    index=index,
                    logprobs=self._logprobs_json(choice.token_ids, logprobs.get(index, []), 0),
                    finish_reason=str(choice.finish),
                )
                if self._token_ids:
                    body["token_ids"] = choice.token_ids
                choices.append(body)
        answer: JSON = {
            **self._base,
            "object": self.whole_object,
            "choices": choices,
            "usage": usage_json(self._session.usage()),
        }
        self._add_prompts(answer)
        if self._receipt:
            answer["speculation"] = receipts(self._session.requests)
        return answer

    @abstractmethod
    def first(self, prompt: int, index: int) -> JSON | None:
        """What a choice's stream begins with."""

    def pieces(self, index: int, delta: Delta, *, last: bool) -> list[JSON]:
        """Chunks of one delta; ``last`` marks the call's last one with choices."""
        chunks = []
        asked = bool(delta.token_ids) and (self._token_ids or self._logprobs is not None)
        if delta.text or (asked and delta.finish is None):
            chunks.append(self._chunk(index, delta.text, delta, None))
            delta = Delta(delta.choice, delta.offset, finish=delta.finish)
        if delta.finish is not None:
            chunk = self._chunk(index, None, delta, str(delta.finish))
            if last and self._receipt:
                chunk["speculation"] = receipts(self._session.requests)
            chunks.append(chunk)
        return chunks

    def usage_chunk(self) -> JSON | None:
        if not self._include_usage:
            return None
        usage = usage_json(self._session.usage())
        chunk: JSON = {**self._base, "object": self.chunk_object, "choices": [], "usage": usage}
        if self._receipt:
            # The stream's last chunk has the receipt; readers that skip chunks without choices had it before.
            chunk["speculation"] = receipts(self._session.requests)
        return chunk

    def _chunk(self, index: int, text: str | None, delta: Delta, finish: str | None) -> JSON:
        choice: JSON = {
            "index": index,
            **self._text(text),
            "logprobs": self._logprobs_json(delta.token_ids, delta.logprobs, delta.offset),
            "finish_reason": finish,
        }
        if self._token_ids:
            choice["token_ids"] = delta.token_ids
        return self._with_usage([choice])

    def _with_usage(self, choices: list[JSON]) -> JSON:
        chunk: JSON = {**self._base, "object": self.chunk_object, "choices": choices}
        if self._include_usage:
            usage = usage_json(self._session.usage()) if self._usage_in_every_chunk else None
            chunk["usage"] = usage
        return chunk

    @abstractmethod
    def _add_prompts(self, answer: JSON) -> None:
        """Adds the prompts' token ids, if they were asked for."""

    @abstractmethod
    def _whole_choice(self, prompt: int, text: str) -> JSON:
        """The text of a choice of an answer that is not streamed."""

    @abstractmethod
    def _text(self, text: str | None) -> JSON:
        """The text of one chunk."""

    @abstractmethod
    def _logprobs_json(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
    ) -> JSON | None:
        """Log probabilities in the endpoint's form; None if none were asked for."""

    def _token(self, token_id: int) -> tuple[str, bytes]:
        data = self._codec.token_bytes(token_id)
        return data.decode("utf-8", "replace"), data


class ChatFormat(Format):
    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first(self, prompt: int, index: int) -> JSON:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._with_usage([choice])
        self._add_prompts(chunk)
        return chunk

    def _add_prompts(self, answer: JSON) -> None:
        if self._token_ids:
            answer["prompt_token_ids"] = self._session.requests[0].job.prompt_token_ids

    def _whole_choice(self, prompt: int, text: str) -> JSON:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _text(self, text: str | None) -> JSON:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs_json(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
    ) -> JSON | None:
        if self._logprobs is None or not logprobs:
            return None
        content = []
        for token_id, value in zip(token_ids, logprobs, strict=False):
            entry = self._entry(token_id, value.logprob)
            entry["top_logprobs"] = [self._entry(i, p) for i, p in value.top[: self._logprobs]]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> JSON:
        text, data = self._token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(data)}


class CompletionFormat(Format):
    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Characters written before the next token of each choice, for text_offset.
        self._written: dict[int, int] = {}
        self._index = 0

    def first(self, prompt: int, index: int) -> JSON | None:
        if not self._echoed and not self._token_ids:
            return None
        choice: JSON = {
            "index": index,
            "text": self._echoed[prompt] if self._echoed else "",
            "logprobs": None,
            "finish_reason": None,
        }
        if self._token_ids:
            choice["token_ids"] = []
            choice["prompt_token_ids"] = self._session.requests[prompt].job.prompt_token_ids
        return self._with_usage([choice])

    def pieces(self, index: int, delta: Delta, *, last: bool) -> list[JSON]:
        self._index = index
        return super().pieces(index, delta, last=last)

    def _add_prompts(self, answer: JSON) -> None:
        if not self._token_ids:
            return
        for choice in answer["choices"]:
            requests = self._session.requests
            request = requests[choice["index"] // len(requests[0].choices)]
            choice["prompt_token_ids"] = request.job.prompt_token_ids

    def _whole_choice(self, prompt: int, text: str) -> JSON:
        self._index = -1
        return {"text": (self._echoed[prompt] if self._echoed else "") + text}

    def _text(self, text: str | None) -> JSON:
        return {"text": text or ""}

    def _logprobs_json(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
    ) -> JSON | None:
        if self._logprobs is None or not logprobs:
            return None
        at = self._written.get(self._index, 0) if self._index >= 0 else 0
        tokens, offsets = [], []
        for token_id in token_ids[: len(logprobs)]:
            text = self._token(token_id)[0]
            tokens.append(text)
            offsets.append(at)
            at += len(text)
        if self._index >= 0:
            self._written[self._index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [value.logprob for value in logprobs],
            "top_logprobs": [
                {self._token(i)[0]: p for i, p in value.top[: self._logprobs]} or None for value in logprobs
            ],
            "text_offset": offsets,
        }
