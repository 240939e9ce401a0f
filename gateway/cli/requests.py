"""`grid explain`: where a call ran and why, and how it went against what was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from gateway.cli.console import out, print_fields, print_json, print_table, visible
from gateway.cli.options import AsJson, with_grid

if TYPE_CHECKING:
    from grid import Grid

COLUMNS = ("step", "", "unit", "network", "queue", "prefill", "decode", "pressure", "total ms", "")
NO_TIME = "-"


@with_grid
def explain(
    request_id: Annotated[str, typer.Argument(help="From `x-request-id` or an answer.", show_default=False)],
    *,
    grid: Grid,
    as_json: AsJson = False,
) -> None:
    """Show what was decided for a call, what was rejected, and predicted against actual times."""
    told = grid.explanation(request_id)
    if as_json:
        print_json(told)
    else:
        print_explanation(told)


def print_explanation(told: dict[str, Any]) -> None:
    usage = told["usage"]
    print_fields(
        {
            "request": told["request_id"],
            "ended": told["ended_at"],
            "what": told["pipeline_id"] or told["model"] or told["route"],
            "outcome": f"{told['outcome']} ({told['status']})",
            **({"error": _error(told["error"])} if told["error"] else {}),
            "took": f"{told['total_ms']:.1f} ms, {usage['cu_seconds']:.6f} cu_seconds",
            "tokens": f"{usage['input_tokens']} in ({usage['cached_tokens']} cached), "
            f"{usage['output_tokens']} out",
        }
    )
    for run in told["runs"]:
        for step in run["steps"]:
            out.print()
            print_table(COLUMNS, list(_rows(step)), "no unit was asked")
            for placement in step["placements"]:
                _print_rejections(placement["rejected_by_code"])
            if step["error"] is not None:
                _print_rejections(step["error"]["details"].get("rejected_by_code", {}))
                for reason in step["error"]["details"].get("reasons", ()):
                    out.print(Text(f"  {visible(reason)}", "dim"), soft_wrap=True)


def _rows(step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The chosen unit with its predicted times, the next best ones, and last how long it took."""
    name = step["step_id"]
    for placement in step["placements"]:
        yield (name, "chosen", *_predicted(placement["chosen"]), placement["outcome"] or "left")
        for candidate in placement["next_best"]:
            yield (name, "next best", *_predicted(candidate), "")
    actual = step["actual"]
    if actual is not None:
        times = [_ms(actual[what]) for what in ("queue_ms", "prefill_ms", "decode_ms")]
        ended = _error(step["error"]) if step["error"] else ""
        yield (name, "actual", NO_TIME, NO_TIME, *times, NO_TIME, _ms(actual["total_ms"]), ended)


def _predicted(candidate: dict[str, Any]) -> tuple[str, ...]:
    parts = ("network_ms", "queue_ms", "prefill_ms", "decode_ms", "pressure_ms", "total_ms")
    return (candidate["unit_id"], *(_ms(candidate[part]) for part in parts))


def _print_rejections(counts: dict[str, int]) -> None:
    if counts:
        listed = ", ".join(f"{count} by {code}" for code, count in sorted(counts.items()))
        out.print(Text(f"  rejected: {visible(listed)}", "dim"), soft_wrap=True)


def _ms(value: float) -> str:
    return f"{value:.1f}"


def _error(error: dict[str, Any]) -> str:
    where = f" at {error['param']}" if error["param"] else ""
    return f"{error['code']}{where}" + (f": {error['message']}" if error["message"] else "")
