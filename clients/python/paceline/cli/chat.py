"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from paceline.cli.console import AsJson, fail, print_json, say


def chat(
    url: Annotated[str, typer.Option("--url", help="The gateway.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="Default: the first one served.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="One question; else stdin or a dialogue.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.7,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Print each answer's receipt on stderr.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Ask a served model. Ctrl-C cancels the answer, an empty line or Ctrl-D ends the dialogue."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    history = [] if system is None else [{"role": "system", "content": system}]
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    one_shot = prompt is not None
    while question := prompt if one_shot else _ask():
        history.append({"role": "user", "content": question})
        text = _turn(url, model, {**options, "messages": history}, receipt, json, one_shot)
        if one_shot:
            return
        history.append({"role": "assistant", "content": text})
    if one_shot:
        fail("--prompt: the prompt is empty", 2)


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _turn(
    url: str, model: str | None, body: dict[str, Any], receipt: bool, as_json: bool, one_shot: bool
) -> str:
    """The answer's text; what came of it if it was cancelled."""
    import asyncio

    import httpx

    from paceline.cli.answers import Answer, first_model, http_client, print_receipt, stream_answer
    from paceline.cli.sse import ApiError

    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    async def ask() -> Answer:
        async with http_client(url) as client:
            name = model or await first_model(client)
            return await stream_answer(client, {**body, "model": name}, show)

    try:
        answer = asyncio.run(ask())
    except KeyboardInterrupt:
        if one_shot:
            fail("cancelled")
        say("\n(cancelled)")
        return "".join(pieces)
    except (ApiError, httpx.HTTPError) as error:
        fail(f"{url}: {error or type(error).__name__}")
    if as_json:
        print_json(
            {"text": answer.text, "finish_reason": answer.finish_reason, "speculation": answer.receipt}
        )
    else:
        sys.stdout.write("\n")
    if receipt:
        print_receipt(answer)
    return answer.text
