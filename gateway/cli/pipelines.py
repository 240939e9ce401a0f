"""`grid apply`, `invoke` and `run`: pipelines declared and run, and contracts run once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gateway.cli.console import counting, err, out, print_json, steps, visible
from gateway.cli.manifest import load_manifest
from gateway.cli.options import AsJson, Variables, variables_of, with_grid
from gateway.cli.plans import print_plan
from grid.runs import Token

if TYPE_CHECKING:
    from grid import Grid
    from grid.client import Run
    from grid.runs import Answer


@with_grid
def apply(
    file: Annotated[
        Path, typer.Argument(help="A pipeline contract or a manifest, as JSON.", show_default=False)
    ],
    *,
    grid: Grid,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for active.", min=0.0)
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Make the grid be what FILE declares: data source, documents, pipeline. Waits until it is active."""
    manifest = load_manifest(file)
    done: dict[str, Any] = {}
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
        how = "unchanged, active" if pipeline["unchanged"] else "active"
        active = f"{how} as {pipeline['pipeline_id']}, revision {pipeline['revision']}"
        out.print(Text(f"pipeline {pipeline['name']}: {active}"), soft_wrap=True)


@with_grid
def invoke(
    pipeline: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    text: Annotated[str, typer.Argument(metavar="INPUT", help="What to ask.", show_default=False)],
    *,
    grid: Grid,
    variable: Variables = None,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline and print its answer as it comes."""
    options = variables_of(variable)
    if as_json:
        print_json(_answer_view(grid.pipeline(pipeline).invoke(text, **options)))
    else:
        _print_run(grid.pipeline(pipeline).stream(text, **options))


@with_grid
def run(
    file: Annotated[Path, typer.Argument(help="A pipeline contract, as JSON.", show_default=False)],
    text: Annotated[
        str | None, typer.Argument(metavar="[INPUT]", help="What to ask.", show_default=False)
    ] = None,
    *,
    grid: Grid,
    variable: Variables = None,
    as_json: AsJson = False,
) -> None:
    """Run the contract in FILE once, without storing it. Without INPUT show what it would do."""
    contract = dict(load_manifest(file).pipeline or {})
    written = contract.pop("input", None)
    asked = text if text is not None else written
    options = variables_of(variable)
    if asked is None:
        plan = grid.plan(contract)
        print_json(plan) if as_json else print_plan(plan)
    elif as_json:
        print_json(_answer_view(grid.run_once(contract, asked, **options)))
    else:
        _print_run(grid.stream_once(contract, asked, **options))


def _print_run(run: Run) -> None:
    with run:
        for event in run:
            if isinstance(event, Token):
                typer.echo(visible(event.text), nl=False)
    typer.echo()
    _print_summary(run.answer())


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
