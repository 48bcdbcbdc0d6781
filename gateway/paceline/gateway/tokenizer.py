"""Text to token ids and back: the model's tokenizer and chat template, without torch or transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RawTokenizer

from paceline.core.errors import ConfigError, ErrorKind, PacelineError, invalid
from paceline.wire.models import ModelFiles

INLINE_CHARACTERS = 4096
"""Shorter text is encoded on the event loop: it takes less than handing it to a thread."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 5
"""Prompt tokens that the first output token is decoded after, so that word starts keep their space."""
_LONGEST_HOLD_TOKENS = 16
"""Tokens held back for an incomplete character before they are taken for invalid bytes (UTF-8 needs 4)."""


class TextCodec:
    """Tokenizer and chat template of one model."""

    def __init__(self, files: ModelFiles) -> None:
        try:
            self._raw: Any = RawTokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ConfigError(f"model: {files.tokenizer_json} cannot be read: {error}") from None
        # Padding and truncation are for training batches; some files carry them.
        self._raw.no_padding()
        self._raw.no_truncation()
        self.vocab_size: int = files.vocab_size
        self.eos_token_ids = files.eos_token_ids
        self._special = dict(files.special_tokens)
        self._template = _compile(files.chat_template)
        self._bytes_of = _byte_level_alphabet() if "ByteLevel" in str(self._raw.decoder) else None
        self._added: dict[int, str] = {
            token_id: str(token.content) for token_id, token in self._raw.get_added_tokens_decoder().items()
        }

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a chat.

        Raises:
            PacelineError: INVALID_ARGUMENT if the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise invalid("messages", "the model has no chat template, use /v1/completions")
        if continue_final_message and add_generation_prompt:
            raise invalid("continue_final_message", "needs add_generation_prompt: false")
        try:
            text = self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._special
            )
        except (TemplateError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise invalid("messages", f"the chat template refused them: {error}") from None
        if continue_final_message:
            final = messages[-1]["content"].strip()
            at = text.rfind(final)
            if at < 0:
                raise invalid("continue_final_message", "the template changes the last message")
            text = text[: at + len(final)]
        return text

    async def encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """Token ids of ``text``; long text is encoded in a thread."""
        try:
            if len(text) <= INLINE_CHARACTERS:
                encoding = self._raw.encode(text, add_special_tokens=add_special_tokens)
            else:
                encoding = await asyncio.to_thread(
                    self._raw.encode, text, add_special_tokens=add_special_tokens
                )
        except (UnicodeEncodeError, TypeError) as error:
            raise invalid(field, f"must be valid Unicode: {error}") from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; incomplete UTF-8 where it is part of a character."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of is not None:
            return b"".join(self._bytes_of.get(c, c.encode()) for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises PacelineError if an id is not one of the model's."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise invalid(field, f"token id {token_id} must be from 0 to {self.vocab_size - 1}")


class Detokenizer:
    """Text of a growing list of token ids, one token at a time.

    Tokens are decoded together with those before them (text depends on neighbours), and text that ends in
    an incomplete character waits for the next token.
    """

    def __init__(self, codec: TextCodec, prompt_token_ids: Sequence[int]) -> None:
        self._codec = codec
        context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        # A prompt may end inside a character: its rest must not draw prompt text into the output.
        while context and codec.decode(context).endswith(_REPLACEMENT):
            context.pop()
        self._window = context
        self._read = len(context)
        self._prefix = codec.decode(context)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        held = len(self._window) - self._read
        if text == self._prefix:
            # Special tokens have no text and change none; kept, they would make every decode longer.
            self._window.pop()
            return ""
        if (text.endswith(_REPLACEMENT) and held < _LONGEST_HOLD_TOKENS) or len(text) < len(self._prefix):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What an output that ends here still holds: incomplete bytes become replacement characters."""
        return self._advance(self._codec.decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._prefix) :]
        # The tokens just read are the context of the next ones.
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._prefix = self._codec.decode(self._window)
        return new


def _compile(source: str | None) -> Template | None:
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"model: the chat template cannot be read: {error}") from None


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, bytes]:
    """Characters that GPT-2's byte-level vocabularies write bytes with (Radford et al. 2019, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): bytes([b]) for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    alphabet.update({chr(256 + i): bytes([b]) for i, b in enumerate(others)})
    return alphabet


def context_exceeded(field: str, prompt_tokens: int, max_tokens: int | None, context: int) -> PacelineError:
    asked = f"{prompt_tokens} prompt tokens" + (f" and max_tokens {max_tokens}" if max_tokens else "")
    return PacelineError(
        ErrorKind.CONTEXT_LENGTH_EXCEEDED,
        f"{field}: {asked} do not fit the context of {context} tokens",
        field=field,
    )
