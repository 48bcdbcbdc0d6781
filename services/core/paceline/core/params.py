"""Limits of the sampling parameters, checked once, with the field and the limit named."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.core.errors import invalid
from paceline.core.types import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
INT64 = range(-(2**63), 2**63)


def validate(
    params: SamplingParams,
    *,
    vocab_size: int | None = None,
    max_n: int | None = None,
    field_prefix: str = "",
) -> SamplingParams:
    """Returns ``params`` unchanged if every field is within its limits.

    Args:
        vocab_size: upper bound of token ids in ``logit_bias`` and ``stop_token_ids``, where known.
        max_n: the most choices one request may ask for.
        field_prefix: prepended to field names in errors.

    Raises:
        PacelineError: INVALID_ARGUMENT naming the field and the limit.
    """
    p = field_prefix
    _between(p + "temperature", params.temperature, 0.0, 100.0)
    _between(p + "top_p", params.top_p, 0.0, 1.0, open_low=True)
    if params.top_k < -1:
        raise invalid(p + "top_k", "must be -1 or 0 (all) or at least 1")
    _between(p + "min_p", params.min_p, 0.0, 1.0)
    _between(p + "presence_penalty", params.presence_penalty, -2.0, 2.0)
    _between(p + "frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _between(p + "repetition_penalty", params.repetition_penalty, 0.0, 100.0, open_low=True)
    if params.seed is not None and params.seed not in INT64:
        raise invalid(p + "seed", "must be a signed 64-bit integer")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid(p + "logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries")
    for bias in params.logit_bias.values():
        _between(p + "logit_bias", bias, -100.0, 100.0)
    _token_ids(p + "logit_bias", params.logit_bias, vocab_size)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise invalid(p + "max_tokens", "must be at least 1")
    if params.min_tokens < 0:
        raise invalid(p + "min_tokens", "must be at least 0")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise invalid(p + "min_tokens", f"must be at most max_tokens ({params.max_tokens})")
    if len(params.stop) > MAX_STOPS:
        raise invalid(p + "stop", f"must have at most {MAX_STOPS} strings")
    if any(not stop for stop in params.stop):
        raise invalid(p + "stop", "must not hold an empty string")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in params.stop):
        raise invalid(p + "stop", f"must have at most {MAX_STOP_CHARACTERS} characters a string")
    if len(params.stop_token_ids) > MAX_STOPS:
        raise invalid(p + "stop_token_ids", f"must have at most {MAX_STOPS} ids")
    _token_ids(p + "stop_token_ids", params.stop_token_ids, vocab_size)
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise invalid(p + "logprobs", f"must be from 0 to {MAX_LOGPROBS}")
    if params.n < 1 or (max_n is not None and params.n > max_n):
        raise invalid(p + "n", f"must be from 1 to {max_n}" if max_n is not None else "must be at least 1")
    return params


def _between(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        limit = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise invalid(field, f"must be {limit}")


def _token_ids(field: str, token_ids: Iterable[int], vocab_size: int | None) -> None:
    for token_id in token_ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            limit = f"from 0 to {vocab_size - 1}" if vocab_size is not None else "at least 0"
            raise invalid(field, f"token id {token_id} must be {limit}")
