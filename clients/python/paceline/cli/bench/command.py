"""The command `paceline bench`: options, one run, its table and JSON file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import EXIT_USAGE, fail, say

if TYPE_CHECKING:
    from paceline.cli.bench.run import Record
    from paceline.cli.bench.workload import Request


class Arrivals(StrEnum):
    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"


@dataclass(frozen=True)
class Source:
    """Where requests come from and how they are paced; exactly one of each."""

    prompts: Path | None
    trace: str | None
    lengths: str | None
    length_scale: float
    rate_scale: float
    rate_rps: float | None
    arrival: str | None
    concurrency: int | None
    seconds: float
    max_tokens: int
    seed: int

    def check(self) -> None:
        """Raises ValueError naming the options that do not go together."""
        if sum(option is not None for option in (self.prompts, self.trace, self.lengths)) != 1:
            raise ValueError("want exactly one of --prompts, --trace, --lengths")
        if self.rate_rps is not None and self.concurrency is not None:
            raise ValueError("want --rate or --concurrency, not both")
        if self.rate_rps is None and self.concurrency is None and self.trace is None:
            raise ValueError("want --rate or --concurrency (only a trace has arrival times of its own)")
        if self.arrival is not None and self.rate_rps is None:
            raise ValueError("--arrival: needs --rate")
        if self.seconds <= 0 or self.length_scale <= 0 or self.rate_scale <= 0:
            raise ValueError("--seconds, --scale-length, --scale-rate: want numbers above 0")

    def build(self) -> tuple[Iterator[Request], list[float] | None]:
        """The requests, and the times they are due (None: closed loop)."""
        from paceline.cli.bench import workload

        times: list[float] | None = None
        if self.rate_rps is not None:
            arrival: Any = self.arrival or "poisson"
            times = workload.arrival_times(arrival, self.rate_rps, self.seconds, self.seed)
        if self.prompts is not None:
            return cycle(workload.prompt_requests(self.prompts, self.max_tokens, self.seed)), times
        if self.lengths is not None:
            prompt_tokens, output_tokens = parse_lengths(self.lengths)
            return workload.length_requests(prompt_tokens, output_tokens, self.seed), times
        rows = workload.read_trace(self.trace or "")
        if self.rate_rps is None and self.concurrency is None:
            times = workload.trace_times(rows, self.rate_scale, self.seconds)
        return workload.trace_requests(cycle(rows), self.length_scale, self.seed), times


def parse_lengths(text: str) -> tuple[int, int]:
    """``P:G`` prompt and output tokens; ValueError otherwise."""
    prompt, _, output = text.partition(":")
    if not (prompt.isdigit() and output.isdigit() and int(prompt) > 0 and int(output) > 0):
        raise ValueError(f"--lengths: want PROMPT:OUTPUT in tokens, both above 0, got {text!r}")
    return int(prompt), int(output)


def bench(
    url: Annotated[str, typer.Option("--url", metavar="U", help="The server.")],
    model: Annotated[str, typer.Option("--model", metavar="M", help="Name it serves.")],
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="How long requests are sent.")],
    prompts: Annotated[Path | None, typer.Option("--prompts", metavar="F", help="JSON lines.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", metavar="azure:F|mooncake:F")] = None,
    lengths: Annotated[str | None, typer.Option("--lengths", metavar="P:G", help="Tokens.")] = None,
    scale_length: Annotated[float, typer.Option("--scale-length", help="Times the trace's lengths.")] = 1.0,
    scale_rate: Annotated[float, typer.Option("--scale-rate", help="Times the trace's rate.")] = 1.0,
    rate: Annotated[float | None, typer.Option("--rate", metavar="R", help="Requests a second.")] = None,
    arrival: Annotated[
        Arrivals | None, typer.Option("--arrival", help="With --rate; default poisson.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", metavar="N", min=1)] = None,
    slo: Annotated[str, typer.Option("--slo", metavar="ttft_ms=,tpot_ms=")] = "",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of prompts, arrivals and sampling.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="With --prompts.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds without a byte.")] = 300.0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write the report; - is stdout.")
    ] = None,
) -> None:
    """Measure a server under load. Exit 1 if no request was answered."""
    import asyncio

    from paceline.cli.bench.report import parse_slo, report
    from paceline.cli.bench.workload import WorkloadError

    source = Source(
        prompts,
        trace,
        lengths,
        scale_length,
        scale_rate,
        rate,
        arrival,
        concurrency,
        seconds,
        max_tokens,
        seed,
    )
    try:
        targets = parse_slo(slo)
        source.check()
        if json is not None and str(json) != "-" and not json.parent.is_dir():
            raise ValueError(f"--json: there is no folder {json.parent}")
        requests, times = source.build()
    except (ValueError, WorkloadError) as error:
        fail(str(error), EXIT_USAGE)
    body = {"model": model, "temperature": temperature, "seed": seed}
    records = asyncio.run(_measure(url, body, requests, times, concurrency or 1, seconds, timeout_s))
    result = {"protocol": {"url": url, "model": model, "seed": seed}, **report(records, targets)}
    _write(result, json)
    if result["errors"] == result["requests"]:
        codes = sorted({record.error for record in records if record.error})
        fail(f"no request was answered ({', '.join(codes) or 'none was sent'})")


async def _measure(
    url: str,
    body: dict[str, Any],
    requests: Iterator[Request],
    times: list[float] | None,
    concurrency: int,
    seconds: float,
    timeout_s: float,
) -> list[Record]:
    import httpx

    from paceline.cli.bench.run import Load

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(timeout_s, pool=None)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"), limits=limits, timeout=timeout, trust_env=False
    ) as client:
        load = Load(client, body)
        if times is None:
            return await load.closed_loop(requests, concurrency, seconds)
        return await load.open_loop(requests, times)


def _write(result: dict[str, Any], file: Path | None) -> None:
    import json

    text = json.dumps(result)
    if file is not None and str(file) == "-":
        typer.echo(text)
        return
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")
        say(f"paceline: wrote {file}")
    _table(result)


def _table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    table = Table("", "p50", "p95", "p99")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        table.add_row(name, *(number(result[name][p]) for p in ("p50", "p95", "p99")))
    console = Console()
    console.print(table)
    console.print(
        f"{result['requests']} requests, {result['errors']} errors in {result['duration_s']:.1f} s; "
        f"{result['output_tokens_per_s']:.1f} output tokens/s; "
        f"goodput {result['goodput_rps']:.2f} requests/s; "
        f"SLO attained {number(result['slo_attained'], 3)}; acceptance {number(result['acceptance'], 3)}"
    )
