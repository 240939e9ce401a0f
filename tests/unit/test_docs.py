"""The pages on the interfaces name all that there is, and nothing else: commands, routes, codes, figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from gateway.cli.app import app
from gateway.http.errors import MethodNotAllowed, RequestTimeout
from gateway.observe.prometheus import render
from grid.errors import ERRORS, Cancelled, Interrupted
from grid.wire.messages import Fleet

ROOT = Path(__file__).parents[2]

EVERYWHERE = {"--json", "--url", "--key", "--ca", "--config", "-f", "--data"}
"""Options that a sentence or the table of settings has, not each command's row."""

UNSAID = {Interrupted.code, Cancelled.code}
"""The family's name, and what a client that has left does not hear."""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text: str, beginning: str) -> list[list[str]]:
    """Return the cells of the lines of tables that begin so."""
    found = [line for line in text.splitlines() if re.match(beginning, line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found]


def spelled_out(name: str) -> Iterator[str]:
    """Return what `a_{b,c}` stands for."""
    before, brace, rest = name.partition("{")
    if not brace:
        yield name
        return
    choices, _, after = rest.partition("}")
    for choice in choices.split(","):
        yield from spelled_out(f"{before}{choice}{after}")


def named(text: str, beginning: str) -> set[str]:
    """Return the names in backticks that begin so."""
    return {name for span in re.findall(rf"`({beginning}[^`]+)`", text) for name in spelled_out(span)}


def commands(command: Any, name: str = "") -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        for inner, found in command.commands.items():
            yield from commands(found, f"{name} {inner}".strip())
    else:
        yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands(get_command(app))))
def test_the_command_line_is_documented(name: str, command: TyperCommand) -> None:
    group, _, inner = name.partition(" ")
    [row] = [" ".join(cells) for cells in rows(page("cli.md"), rf"\| `grid {group}\b")]
    assert inner in row
    for option in command.params:
        if isinstance(option, TyperOption) and not EVERYWHERE.intersection(option.opts):
            assert any(opt in row for opt in (*option.opts, *option.secondary_opts)), option.opts


def test_settings_of_the_command_line_are_documented() -> None:
    settings = " ".join(cells[0] for cells in rows(page("cli.md"), r"\| `-"))
    assert EVERYWHERE - {"--json"} == set(re.findall(r"`(-[-\w]+)`", settings))


def test_error_codes_are_documented() -> None:
    said = {
        code for cells in rows(page("http.md"), r"\| \d{3} \|") for code in re.findall(r"`(\w+)`", cells[1])
    }
    assert said == (set(ERRORS) - UNSAID) | {MethodNotAllowed.code, RequestTimeout.code}


def test_prometheus_names_are_documented() -> None:
    scrape = render({}, Fleet(0, 0, ()), 0.0).decode()
    there = set(re.findall(r"^# TYPE (\S+)", scrape, re.MULTILINE))
    table = "\n".join(cells[0] for cells in rows(page("metrics.md"), r"\| `(gen_ai|zerogrid)_"))
    assert named(table, "(?:gen_ai|zerogrid)_") == there


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Serve's own, as it is imported
def test_names_on_rays_ports_are_documented() -> None:
    from gateway.compose import PLACEMENT_FIGURES
    from gateway.observe.recorder import REPLICA_FIGURES
    from gateway.replica import DECIDED_ALONE
    from grid.units.figures import TEXTS as UNIT_FIGURES

    there = {f"ray_{name}" for name in (*PLACEMENT_FIGURES, *UNIT_FIGURES, *REPLICA_FIGURES, DECIDED_ALONE)}
    assert named(page("metrics.md"), "ray_zerogrid_") == there


@pytest.mark.slow  # all shapes of the interface are worked out
def test_routes_are_documented() -> None:
    from gateway.http.cold import build_cold_app

    said = set()
    for [cell, *_] in rows(page("http.md"), r"\| (POST|GET)\b"):
        for part in cell.split(";"):
            methods = re.findall(r"\b(?:POST|GET|PUT|DELETE|HEAD)\b", part)
            said |= {(method, path) for method in methods for path in re.findall(r"`(/[^`]+)`", part)}
    there = {
        (method.upper(), re.sub(r"\{\w+\}", "{id}", path))
        for path, methods in build_cold_app().openapi()["paths"].items()
        for method in methods
    }
    assert said == there
