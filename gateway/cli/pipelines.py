"""`grid apply` and `invoke`: pipelines declared and run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gateway.cli.console import counting, err, out, print_json, reporting, steps, visible
from gateway.cli.manifest import load_manifest
from gateway.cli.options import DEFAULT_URL, AsJson, CaFile, Key, Url, connected
from grid.errors import InvalidRequest
from grid.runs import Token

if TYPE_CHECKING:
    from grid.runs import Answer


def apply(
    file: Annotated[
        Path, typer.Argument(help="A pipeline contract or a manifest, as JSON.", show_default=False)
    ],
    url: Url = DEFAULT_URL,
    key: Key = "",
    ca: CaFile = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for active.", min=0.0)
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Make the grid be what FILE declares: data source, documents, pipeline. Waits until it is active."""
    with reporting(as_json):
        manifest = load_manifest(file)
        done: dict[str, Any] = {}
        with connected(url, key, ca) as grid:
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


def invoke(
    pipeline: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    text: Annotated[str, typer.Argument(metavar="INPUT", help="What to ask.", show_default=False)],
    url: Url = DEFAULT_URL,
    key: Key = "",
    ca: CaFile = None,
    variable: Annotated[list[str] | None, typer.Option("--var", help="NAME=VALUE, repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline and print its answer as it comes."""
    with reporting(as_json):
        variables = _variables(variable or [])
        options = {"variables": variables} if variables else {}
        with connected(url, key, ca) as grid:
            if as_json:
                print_json(_answer_view(grid.pipeline(pipeline).invoke(text, **options)))
                return
            with grid.pipeline(pipeline).stream(text, **options) as run:
                for event in run:
                    if isinstance(event, Token):
                        typer.echo(visible(event.text), nl=False)
            typer.echo()
            _print_summary(run.answer())


def _variables(given: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise InvalidRequest(f"--var {name!r} should be NAME=VALUE", param="var")
    return {name: value for name, _, value in pairs}


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
