"""`grid dry-run`, and what `grid run` shows without input: where each step would run, and why there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gateway.cli.console import err, out, print_json, print_table, visible
from gateway.cli.options import AsJson, Variables, variables_of, with_grid

if TYPE_CHECKING:
    from grid import Grid

MAX_SHOWN = 10
"""Units of each kind and step on a screen; `--json` has all that the grid tells."""
COLUMNS = ("unit", "GPU", "region", "queue", "cached", "prefill", "decode", "total ms", "cu s")


@with_grid
def dry_run(
    pipeline: Annotated[str, typer.Argument(help="Name or id.", show_default=False)],
    text: Annotated[str, typer.Argument(metavar="INPUT", help="What would be asked.", show_default=False)],
    *,
    grid: Grid,
    variable: Variables = None,
    as_json: AsJson = False,
) -> None:
    """Show where a call would run and why. Nothing is run, reserved or charged."""
    options = variables_of(variable)
    plan = grid.pipeline(pipeline).dry_run(text, **options)
    if as_json:
        print_json(plan)
    else:
        print_plan(plan)


def print_plan(plan: dict[str, Any]) -> None:
    for step in plan["steps"]:
        _print_step(step)
    if plan["runnable"]:
        figures = f"first token after {plan['ttft_ms']:.1f} ms, all after {plan['total_ms']:.1f} ms"
        out.print(Text(f"{figures}, {plan['cu_seconds']:.4f} cu_seconds"), soft_wrap=True)
    else:
        out.print(Text("it can't run now", "bold red"))
    for warning in plan["warnings"]:
        err.print(Text.assemble(("warning: ", "yellow"), visible(warning)), soft_wrap=True)


def _print_step(step: dict[str, Any]) -> None:
    uses = f", uses {', '.join(step['uses'])}" if step["uses"] else ""
    title = (visible(step["step_id"]), "bold"), f"  {visible(step['model'])}{visible(uses)}"
    out.print(Text.assemble(*title), soft_wrap=True)
    if step["refusal"] is not None:
        out.print(Text(visible(step["refusal"]["message"]), "red"), soft_wrap=True)
    elif step["candidates"]:
        print_table(COLUMNS, [_row(unit) for unit in step["candidates"][:MAX_SHOWN]], "")
        _print_more(step["candidate_count"], "candidates")
    for rejected in step["rejections"][:MAX_SHOWN]:
        out.print(
            Text(f"not {visible(rejected['unit_id'])}: {visible(rejected['detail'])}", "dim"), soft_wrap=True
        )
    _print_more(sum(step["rejected_by_code"].values()), "rejected")
    out.print()


def _row(unit: dict[str, Any]) -> tuple[Any, ...]:
    queue_ms, *times = (round(unit[name], 1) for name in ("queue_ms", "prefill_ms", "decode_ms", "total_ms"))
    gpu = unit["gpu_type"] + (" (simulated)" if unit["simulated"] else "")
    where = unit["unit_id"], gpu, unit["region"]
    return (*where, queue_ms, unit["cached_tokens"], *times, round(unit["cu_seconds"], 4))


def _print_more(count: int, what: str) -> None:
    if count > MAX_SHOWN:
        out.print(Text(f"… {count - MAX_SHOWN} more {what}; --json lists them", "dim"))
