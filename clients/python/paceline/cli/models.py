"""`paceline models`: models on disk."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.console import AsJson, fail, print_json, say

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Models on disk.")

Name = Annotated[str, typer.Argument(help="Bundled name, hub id, or local path.")]


@app.command("pull")
def pull(name: Name, json: AsJson = False) -> None:
    """Fetch a model, or convert a local GGUF file, into the cache; nothing to do if it is there."""
    from paceline.core.errors import ConfigError
    from paceline.engine import store

    try:
        path = store.pull(name, say)
    except (ConfigError, OSError) as error:
        fail(str(error))
    _print(name, str(path), json)


@app.command("path")
def path(name: Name, json: AsJson = False) -> None:
    """Print a model's folder; exit 1 if it is not on disk."""
    from paceline.core.errors import ConfigError
    from paceline.wire.models import locate_path

    try:
        found = locate_path(name)
    except ConfigError as error:
        fail(str(error))
    _print(name, str(found), json)


@app.command("list")
def list_models(json: AsJson = False) -> None:
    """Print the models in Paceline's own cache and the bundled ones not fetched yet."""
    from paceline.wire.models import BUNDLED, cache_dir, verify_manifest

    folder = cache_dir() / "models"
    # Folders with a dot are downloads that were not finished.
    here = {entry.name for entry in folder.glob("[!.]*") if entry.is_dir()}
    rows = []
    for name in sorted(here | set(BUNDLED)):
        complete = name in here and verify_manifest(folder / name, checksums=False) is None
        size_bytes = (
            sum(f.stat().st_size for f in (folder / name).rglob("*") if f.is_file()) if complete else 0
        )
        rows.append({"name": name, "path": str(folder / name), "present": complete, "size_bytes": size_bytes})
    if json:
        print_json({"models": rows})
        return
    for row in rows:
        typer.echo(f"{row['name']}\t{row['path'] if row['present'] else 'not fetched'}")


def _print(name: str, path: str, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "path": path})
    else:
        typer.echo(path)
