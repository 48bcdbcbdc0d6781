"""One streamed chat answer and the receipt that came with it; shared by `chat` and `demo`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.cli.sse import ApiError, chunks, error_of


@dataclass
class Answer:
    """What came back so far. ``e2e_s`` is measured here, from the request's first byte."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    receipt: dict[str, Any] = field(default_factory=dict)
    e2e_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.e2e_s if self.e2e_s > 0 else 0.0


def http_client(url: str) -> httpx.AsyncClient:
    # No limit on reading: the server answers every request with tokens or an error.
    timeout = httpx.Timeout(None, connect=10.0)
    return httpx.AsyncClient(base_url=url.rstrip("/"), timeout=timeout, trust_env=False)


async def first_model(client: httpx.AsyncClient) -> str:
    """Name of the model the server serves."""
    response = await client.get("/v1/models")
    if response.status_code != 200:
        raise error_of(response.status_code, response.content)
    models = response.json()["data"]
    if not models:
        raise ApiError("model_not_found", "the server lists no models")
    return str(models[0]["id"])


async def stream_answer(
    client: httpx.AsyncClient, body: Mapping[str, Any], on_text: Callable[[str], None]
) -> Answer:
    """Sends a chat request and collects its answer; ``on_text`` gets each piece as it arrives.

    Raises:
        ApiError: as `chunks` does.
    """
    answer = Answer()
    started_s = time.perf_counter()
    request = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"receipt": True},
    }
    async for chunk in chunks(client, "/v1/chat/completions", request):
        for choice in chunk.get("choices", ()):
            if piece := choice.get("delta", {}).get("content"):
                answer.text += piece
                on_text(piece)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if usage := chunk.get("usage"):
            answer.completion_tokens = usage["completion_tokens"]
        if receipt := chunk.get("speculation"):
            answer.receipt = receipt
    answer.e2e_s = time.perf_counter() - started_s
    return answer


def print_receipt(answer: Answer) -> None:
    """The receipt as a small table on stderr."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    receipt = answer.receipt
    verified, accepted = receipt.get("verified_tokens", 0), receipt.get("accepted_tokens", 0)
    observed = receipt.get("observed", {})
    drafters = ", ".join(f"{d['id']} ({d['kind']})" for d in receipt.get("drafters", ()))
    table = Table(title=f"receipt {receipt.get('request_id', '')}", title_justify="left", show_header=False)
    rows = {
        "verifiers": ", ".join(receipt.get("verifiers", ())),
        "drafters": drafters or "none",
        "rounds": f"{receipt.get('rounds', 0)}, of which undrafted {receipt.get('undrafted_rounds', 0)}",
        "drafted, verified, accepted": f"{receipt.get('drafted_tokens', 0)}, {verified}, {accepted}",
        "acceptance": f"{accepted / verified:.2f}" if verified else "none verified",
        "first token": f"{observed.get('ttft_ms', 0.0):.0f} ms",
        "each token after": f"{observed.get('tpot_ms', 0.0):.1f} ms",
        "tokens": f"{answer.completion_tokens} in {answer.e2e_s:.2f} s, {answer.tokens_per_s:.1f} a second",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    Console(stderr=True).print(table)
