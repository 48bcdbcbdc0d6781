"""`paceline explain` and `paceline top`: the gateway's admin port, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from paceline.cli.console import EXIT_USAGE, AsJson, fail, print_json

if TYPE_CHECKING:
    from rich.table import Table

Admin = Annotated[str, typer.Option("--admin", metavar="URL", help="The gateway's admin port.")]
DEFAULT_ADMIN = "http://127.0.0.1:9000"

_WORKER_COLUMNS = ("id", "role", "state", "pid", "running", "sessions", "blocks_used", "alpha")
_PAIR_COLUMNS = ("verifier", "drafter", "weight", "k", "predicted_tpot_ms")


def explain(
    request_id: Annotated[
        str | None, typer.Argument(help="From the receipt or the x-request-id header.")
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The request that ended last.")] = False,
    admin: Admin = DEFAULT_ADMIN,
    json: AsJson = False,
) -> None:
    """Say where a request's time went and why its draft lengths were chosen."""
    if (request_id is None) != last:
        fail("want either REQUEST_ID or --last", EXIT_USAGE)
    found = get(admin, f"/requests/{'last' if request_id is None else quote(request_id, safe='')}")
    if json:
        print_json(found)
        return
    from rich.console import Console

    console = Console()
    for table in (_rows("terms", found["terms_s"], "s"), _rounds(found["rounds"])):
        console.print(table)
    receipt = found["receipt"]
    console.print(
        f"request {receipt['request_id']}: {receipt['rounds']} rounds, "
        f"{receipt['accepted_tokens']} of {receipt['verified_tokens']} verified draft tokens accepted; "
        f"drafting pays below {found.get('break_even_rps') or '-'} requests/s"
    )


def top(
    admin: Admin = DEFAULT_ADMIN,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between readings.")] = 1.0,
    json: AsJson = False,
) -> None:
    """Show the fleet until Ctrl-C; with --json once."""
    fleet = get(admin, "/fleet")
    if json:
        print_json(fleet)
        return
    import time

    from rich.live import Live

    try:
        with Live(_fleet(fleet), auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(_fleet(get(admin, "/fleet")), refresh=True)
    except KeyboardInterrupt:
        return


def get(admin: str, path: str) -> Any:
    """JSON from the admin port; exits with 1 if there is none."""
    import httpx

    from paceline.cli.sse import error_of

    url = admin.rstrip("/") + path
    try:
        response = httpx.get(url, timeout=10.0, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{url}: {error or type(error).__name__}")
    if not response.is_success:
        fail(f"{url}: {error_of(response.status_code, response.content)}")
    return response.json()


def _fleet(fleet: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(1, 0))
    for title, columns in (("workers", _WORKER_COLUMNS), ("pairs", _PAIR_COLUMNS)):
        table = Table(*columns, title=title, title_justify="left")
        for row in fleet[title]:
            table.add_row(*(Text(_cell(row.get(column))) for column in columns))
        grid.add_row(table)
    return grid


def _rows(title: str, values: Mapping[str, float], unit: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        table.add_row(name, f"{value:.4f} {unit}")
    return table


def _rounds(rounds: list[Mapping[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    columns = ("k", "asked", "arrived", "accepted", "waited_ms", "reason")
    table = Table("round", *columns, title="rounds", title_justify="left")
    for number, row in enumerate(rounds, 1):
        table.add_row(str(number), *(Text(_cell(row.get(column))) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
