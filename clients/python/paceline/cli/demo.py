"""`paceline demo` (hidden; `make demo`): the stack, one chat, its receipt."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from paceline.cli.console import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, fail, print_json, say, settings_or_exit

# Nearly all of the answer stands in the prompt, so that looking it up there drafts well.
DEFAULT_PROMPT = (
    "Repeat this text word for word, but write Tuesday instead of Monday: On Monday the riders leave the "
    "town at six in the morning. The first rider breaks the wind, the others follow close behind, and after "
    "every mile they change places. On Monday evening they reach the sea."
)


@dataclass(frozen=True)
class Demo:
    """What the variables of `make demo` ask for."""

    flags: dict[str, Any]
    """Settings by dotted key."""
    request: dict[str, Any]
    """Chat request without the model's name."""
    oneshot: bool


def _variable(name: str) -> Any:
    return typer.Option(f"--{name.lower().replace('_', '-')}", envvar=name)


def demo(
    oneshot: Annotated[str, _variable("ONESHOT")] = "",
    prompt: Annotated[str, _variable("PROMPT")] = "",
    port: Annotated[str, _variable("PORT")] = "",
    dtype: Annotated[str, _variable("DTYPE")] = "",
    seed: Annotated[str, _variable("SEED")] = "",
    temperature: Annotated[str, _variable("TEMPERATURE")] = "",
    max_tokens: Annotated[str, _variable("MAX_TOKENS")] = "",
    drafter: Annotated[str, _variable("DRAFTER")] = "",
    k: Annotated[str, _variable("K")] = "",
    model: Annotated[str, _variable("MODEL")] = "",
    draft_model: Annotated[str, _variable("DRAFT_MODEL")] = "",
) -> None:
    """Start the stack, ask it once, show the receipt, then serve until Ctrl-C."""
    started_s = time.perf_counter()
    given = {
        "ONESHOT": oneshot,
        "PROMPT": prompt,
        "PORT": port,
        "DTYPE": dtype,
        "SEED": seed,
        "K": k,
        "TEMPERATURE": temperature,
        "MAX_TOKENS": max_tokens,
        "DRAFTER": drafter,
        "MODEL": model,
        "DRAFT_MODEL": draft_model,
    }
    try:
        wanted = parse(given)
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    settings = settings_or_exit(None, None, wanted.flags)
    from paceline.cli.stack import run_stack

    answered = False

    async def session(ready: dict[str, Any]) -> int | None:
        nonlocal answered
        startup_s = time.perf_counter() - started_s
        code = await _session(ready, wanted, settings.model.served_name, startup_s)
        answered = True
        return code

    def quiet(line: str) -> None:
        """Log lines are for `paceline up`; a child that cannot start still has its last ones shown."""

    code = run_stack(settings, run_dir=None, session=session, forward=quiet)
    if wanted.oneshot and code == EXIT_DONE and not answered:
        fail("stopped before the answer was complete")
    raise typer.Exit(code)


def parse(given: Mapping[str, str]) -> Demo:
    """The demo that the variables describe; empty ones have their default.

    Raises:
        ValueError: naming the variable and what it takes.
    """
    values = {name: value.strip() for name, value in given.items() if value.strip()}
    dtype = _one_of(values, "DTYPE", ("bfloat16", "float32"))
    kind = _one_of(values, "DRAFTER", ("ngram", "model", "suffix", "none"))
    target = values.get("MODEL", "smollm2-135m-instruct")
    flags: dict[str, Any] = {
        "gateway.port": _integer(values, "PORT", 8000, 0, 65_535),
        "model.target": target,
        "engine.dtype": dtype,
        "engine.exact": dtype == "float32",
        "speculation.enabled": kind != "none",
        "drafters": [],
    }
    if kind == "model":
        flags["drafters"] = [
            {"id": "d0", "kind": kind, "path": values.get("DRAFT_MODEL", target), "dtype": dtype}
        ]
    elif kind != "none":
        flags["drafters"] = [{"id": "d0", "kind": kind}]
    if values.get("K", "auto") != "auto":
        flags["speculation.k"] = _integer(values, "K", 0, 0, 16)
    request: dict[str, Any] = {
        "messages": [{"role": "user", "content": values.get("PROMPT", DEFAULT_PROMPT)}],
        "max_tokens": _integer(values, "MAX_TOKENS", 64, 1, 1_000_000),
        "temperature": _temperature(values),
    }
    if "SEED" in values:
        request["seed"] = _integer(values, "SEED", 0, -(2**63), 2**63 - 1)
    return Demo(flags, request, _one_of(values, "ONESHOT", ("0", "1")) == "1")


def _one_of(values: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = values.get(name, allowed[0])
    if value not in allowed:
        raise ValueError(f"{name}: want one of {', '.join(allowed)}, got {value!r}")
    return value


def _integer(values: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = values.get(name, str(default))
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        alternative = "auto or " if name == "K" else ""
        raise ValueError(f"{name}: want {alternative}an integer from {low} to {high}, got {text!r}")
    return value


def _temperature(values: Mapping[str, str]) -> float:
    text = values.get("TEMPERATURE", "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise ValueError(f"TEMPERATURE: want a number from 0 to 2, got {text!r}")
    return value


async def _session(ready: dict[str, Any], wanted: Demo, model: str, startup_s: float) -> int | None:
    import httpx

    from paceline.cli.answers import http_client, print_receipt, stream_answer
    from paceline.cli.sse import ApiError

    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    say(f"paceline: up in {startup_s:.1f} s\n\n> {wanted.request['messages'][0]['content']}\n")
    try:
        async with http_client(ready["http"]) as client:
            answer = await stream_answer(client, {**wanted.request, "model": model}, show)
    except (ApiError, httpx.HTTPError) as error:
        say(f"paceline: {error or type(error).__name__}")
        return EXIT_FAILED
    sys.stdout.write("\n")
    sys.stdout.flush()
    print_receipt(answer)
    if wanted.oneshot:
        result = {**answer.receipt, "text": answer.text, "startup_s": round(startup_s, 3)}
        print_json({**result, "tokens_per_s": round(answer.tokens_per_s, 3)})
        return EXIT_DONE
    say(f"\nServing on {ready['http']} (OpenAI API) and {ready['grpc']} (gRPC); Ctrl-C stops.")
    return None
