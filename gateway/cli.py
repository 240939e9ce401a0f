"""The command `grid`: each is a few calls of the client or of `gateway.launch`, and how to show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from gateway.console import (
    counting,
    err,
    out,
    print_fields,
    print_json,
    print_table,
    reporting,
    steps,
    visible,
)
from gateway.manifest import load_documents, load_manifest
from grid import Grid
from grid.config import Config, load
from grid.errors import GridError, InvalidRequest, Unauthorised
from grid.exchange import DEFAULT_URL
from grid.runs import Answer, Token

DEFAULT_CONFIG = Path("grid.yaml")

app = typer.Typer(
    help="Zerogrid: declare an AI pipeline and call it; the grid does the rest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
keys_app = typer.Typer(help="API keys (operators only).", no_args_is_help=True)
sources_app = typer.Typer(help="Data sources and their documents.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(sources_app, name="sources")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
Url = Annotated[str, typer.Option("--url", envvar="GRID_URL", help="Address of the gateway.")]
Key = Annotated[str, typer.Option("--key", envvar="GRID_API_KEY", help="API key.", show_default=False)]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar="GRID_CONFIG", help="Configuration; by default ./grid.yaml, else all defaults."
    ),
]


@app.command()
def up(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Start a cell on this machine."""
    from gateway import launch

    with reporting(as_json):
        loaded = _config(config)
        with steps() as progress:
            info = launch.up(loaded, progress=progress)
        if as_json:
            print_json(info.as_dict())
            return
        said = "is already up" if info.already_running else f"is up in {info.seconds:g} s"
        out.print(Text.assemble(("Cell ", ""), (info.name, "bold"), f" {said}"))
        print_fields(
            {
                "API": f"{info.base_url} (documentation: {info.base_url}/docs)",
                "Dashboard": info.dashboard_url,
                "State": info.state_dir,
                "Units": ", ".join(info.units) or "none",
            }
        )
        if info.operator_key or info.tenant_key:
            out.print(Text("\nKeys, shown this once:", "bold"))
            print_fields({"Operator": info.operator_key or "", "Tenant": info.tenant_key or ""})
            out.print(
                Text(f"\nexport GRID_URL={info.base_url} GRID_API_KEY={info.tenant_key}"), soft_wrap=True
            )


@app.command()
def down(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Stop the cell on this machine. Pipelines, documents and keys stay."""
    from gateway import launch

    with reporting(as_json):
        loaded = _config(config)
        with steps() as progress:
            stopped = launch.down(loaded, progress=progress)
        if as_json:
            print_json({"stopped": stopped})
        else:
            out.print("The cell is down." if stopped else "No cell was running.")


@app.command()
def status(config: ConfigFile = None, key: Key = "", as_json: AsJson = False) -> None:
    """Show the cell on this machine; with a key, its units too."""
    from gateway import launch

    with reporting(as_json):
        state = launch.status(_config(config))
        if state["running"]:
            with Grid(state["base_url"], key, max_retries=0) as grid:
                state["ready"], state["not_ready"] = _readiness(grid)
                if key.startswith("zg-op-"):
                    state["units"] = grid.units()
        if as_json:
            print_json(state)
        elif not state["running"]:
            out.print("No cell is running; `grid up` starts one.")
        else:
            units = state.pop("units", [])
            reasons = "; ".join(state.pop("not_ready"))
            print_fields({**state, "ready": "yes" if state["ready"] else f"no: {reasons}"})
            if units and isinstance(units[0], dict):
                out.print()
                _print_units(units)


@app.command()
def apply(
    file: Annotated[
        Path, typer.Argument(help="A pipeline contract or a manifest, as JSON.", show_default=False)
    ],
    url: Url = DEFAULT_URL,
    key: Key = "",
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for active.", min=0.0)
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Make the grid be what FILE declares: data source, documents, pipeline. Waits until it is active."""
    with reporting(as_json):
        manifest = load_manifest(file)
        done: dict[str, Any] = {}
        with _grid(url, key) as grid:
            if manifest.data_source is not None:
                done["data_source"] = grid.ensure_source(**manifest.data_source)
            if manifest.documents:
                source_id = done["data_source"]["data_source_id"]
                with counting("documents") as on_progress:
                    done["documents"] = grid.add_documents(source_id, manifest.documents, on_progress)
            if manifest.pipeline is not None:
                with steps() as progress:
                    progress(f"deploying {manifest.pipeline.get('name')}")
                    done["pipeline"] = grid.apply_pipeline(manifest.pipeline, timeout_s)
        if as_json:
            print_json(done)
            return
        if "data_source" in done:
            count = done.get("documents", done["data_source"])["document_count"]
            out.print(Text(f"data source {done['data_source']['name']}: {count} documents"))
        if "pipeline" in done:
            pipeline = done["pipeline"]
            out.print(Text(f"pipeline {pipeline['name']}: active as {pipeline['pipeline_id']}"))


@app.command()
def invoke(
    pipeline: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    text: Annotated[str, typer.Argument(metavar="INPUT", help="What to ask.", show_default=False)],
    url: Url = DEFAULT_URL,
    key: Key = "",
    variable: Annotated[list[str] | None, typer.Option("--var", help="NAME=VALUE, repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline and print its answer as it comes."""
    with reporting(as_json):
        variables = _variables(variable or [])
        options = {"variables": variables} if variables else {}
        with _grid(url, key) as grid:
            if as_json:
                print_json(_answer_view(grid.pipeline(pipeline).invoke(text, **options)))
                return
            with grid.pipeline(pipeline).stream(text, **options) as run:
                for event in run:
                    if isinstance(event, Token):
                        typer.echo(visible(event.text), nl=False)
            typer.echo()
            _print_summary(run.answer())


@app.command()
def units(url: Url = DEFAULT_URL, key: Key = "", as_json: AsJson = False) -> None:
    """List the units: what each owns, runs and has room for."""
    with reporting(as_json), _grid(url, key) as grid:
        listed = grid.units()
        if as_json:
            print_json({"units": listed})
        else:
            _print_units(listed)


@keys_app.command("list")
def keys_list(url: Url = DEFAULT_URL, key: Key = "", as_json: AsJson = False) -> None:
    """List the keys of all tenants, never their secrets."""
    with reporting(as_json), _grid(url, key) as grid:
        listed = grid.keys()
        if as_json:
            print_json({"keys": listed})
            return
        rows = [
            (k["key_id"], k["tenant_id"], "yes" if k["operator"] else "no", k["label"], k["created_at"])
            for k in listed
        ]
        print_table(("key", "tenant", "operator", "label", "created"), rows, "no keys")


@keys_app.command("create")
def keys_create(
    tenant: Annotated[
        str, typer.Argument(help="The tenant that the key is for; made if new.", show_default=False)
    ],
    label: Annotated[str, typer.Option(help="What the key is for.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="An operator's key.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown this once."""
    with reporting(as_json), _grid(url, key) as grid:
        made = grid.create_key(tenant, label=label, operator=operator)
        if as_json:
            print_json(made)
        else:
            print_fields({"key": made["key"], "id": made["key_id"], "tenant": made["tenant_id"]})
            err.print(Text("The key is not stored and not shown again.", "dim"))


@keys_app.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="From `grid keys`.", show_default=False)],
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """End a key, everywhere within a second."""
    with reporting(as_json), _grid(url, key) as grid:
        grid.revoke_key(key_id)
        _deleted(key_id, as_json)


@sources_app.command("list")
def sources_list(url: Url = DEFAULT_URL, key: Key = "", as_json: AsJson = False) -> None:
    """List the data sources."""
    with reporting(as_json), _grid(url, key) as grid:
        listed = grid.sources()
        if as_json:
            print_json({"data_sources": listed})
            return
        rows = [
            (
                s["name"],
                s["data_source_id"],
                s["type"],
                s["embedding_model"],
                s["document_count"],
                s["last_updated_at"],
            )
            for s in listed
        ]
        print_table(
            ("name", "id", "type", "embedding model", "documents", "updated"), rows, "no data sources"
        )


@sources_app.command("create")
def sources_create(
    name: Annotated[str, typer.Argument(show_default=False)],
    model: Annotated[str | None, typer.Option(help="Embedding model; the cell's first by default.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Create a data source in the cell's vector store."""
    with reporting(as_json), _grid(url, key) as grid:
        options = {"embedding_model": model} if model else {}
        _shown(grid.create_source(name, **options), as_json)


@sources_app.command("show")
def sources_show(
    source: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Show one data source."""
    with reporting(as_json), _grid(url, key) as grid:
        _shown(grid.source(source), as_json)


@sources_app.command("add")
def sources_add(
    source: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    file: Annotated[
        Path, typer.Argument(help="JSON lines of {id, text, metadata, title}.", show_default=False)
    ],
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Add or replace documents from a file."""
    with reporting(as_json):
        documents = load_documents(file)
        with _grid(url, key) as grid, counting("documents") as on_progress:
            _shown(grid.add_documents(source, documents, on_progress), as_json)


@sources_app.command("delete")
def sources_delete(
    source: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Delete a data source with its documents."""
    with reporting(as_json), _grid(url, key) as grid:
        grid.delete_source(source)
        _deleted(source, as_json)


def main() -> None:
    app(prog_name="grid")


def _config(path: Path | None) -> Config:
    return load(path if path is not None else DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)


@contextmanager
def _grid(url: str, key: str) -> Iterator[Grid]:
    """Yield a client; a refused key is told with where keys come from."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url {url!r} should begin with http:// or https://", param="url")
    with Grid(url, key) as grid:
        try:
            yield grid
        except Unauthorised as error:
            if key:
                raise
            raise Unauthorised(
                "no API key was given: pass --key or set GRID_API_KEY (`grid up` shows the first keys)",
                **error.details,
            ) from None


def _readiness(grid: Grid) -> tuple[bool, list[str]]:
    try:
        answer = grid.readiness()
    except GridError as error:
        return False, [error.message]
    return answer["ready"], answer["reasons"]


def _variables(given: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise InvalidRequest(f"--var {name!r} should be NAME=VALUE", param="var")
    return {name: value for name, _, value in pairs}


def _shown(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        print_fields(record)


def _deleted(what: str, as_json: bool) -> None:
    if as_json:
        print_json({"deleted": True, "id": what})
    else:
        out.print(Text(f"deleted {visible(what)}"))


def _print_units(listed: list[dict[str, Any]]) -> None:
    rows = [
        (
            u["unit_id"],
            u["model"] + (" (simulated)" if u["simulated"] else ""),
            u["state"],
            u["region"],
            u["gpu_type"],
            u["precision"],
            f"{u['running']}/{u['max_running']}",
            f"{u['waiting']}/{u['max_waiting']}",
        )
        for u in listed
    ]
    print_table(
        ("unit", "model", "state", "region", "GPU", "precision", "running", "waiting"), rows, "no units"
    )


def _print_summary(answer: Answer) -> None:
    last = answer.steps[-1] if answer.steps else None
    parts = [f"TTFT {answer.ttft_ms:.0f} ms", f"{answer.usage.output_tokens} tokens", answer.finish_reason]
    if last is not None:
        parts.append(f"{last.unit_id} in {last.region}{' (simulated)' if last.simulated else ''}")
    err.print(Text(" · ".join(parts), "dim"), soft_wrap=True)
    for warning in answer.warnings:
        err.print(Text.assemble(("warning: ", "yellow"), visible(warning)), soft_wrap=True)


def _answer_view(answer: Answer) -> dict[str, Any]:
    return {**asdict(answer), "usage": answer.usage._asdict()}


if __name__ == "__main__":
    main()
