"""Traces: files of requests that were, and what a fleet is asked made of them. Pure but for reading.

A trace keeps the shape of its arrivals: it is replicated with prefixes of its own until it fills the fleet,
and its time is scaled to the offered rate. Formats: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens),
Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids), and ServeGen's rates
(`servegen.py`).
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from grid.errors import InvalidRequest
from placement.simulator.geography import Origins
from placement.simulator.hardware import CONTEXT_TOKENS
from placement.simulator.world import Request

REQUESTS_A_UNIT = 200
LEAST_SPAN_S = 60.0
"""A run has at least so many requests and lasts so long: with less the fleet would never be in a steady
state."""

MAX_TOKENS = 1 << 24
"""Of one prompt or answer: anything beyond is a mistake in the file."""

MAX_REQUESTS = 5_000_000
"""Of one run, which takes some gigabytes then."""


class Row(NamedTuple):
    """One request of a trace file."""

    at_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    origin: str = ""
    """Region of its client, where the trace says; else drawn."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    rows: Callable[[int, random.Random], list[Row]]
    """(least count, chance) to requests in order of arrival."""
    note: str = ""
    """What was left out, for whoever reads the result."""


class Fields:
    """One line of a trace: its fields, with errors that name file, line, field and remedy."""

    def __init__(self, path: Path, line: int, fields: dict[str, Any]) -> None:
        self._path, self._line, self._fields = path, line, fields

    def wrong(self, field: str, should: str) -> InvalidRequest:
        has = repr(self._fields[field]) if field in self._fields else "missing"
        return InvalidRequest(
            f"{self._path}: line {self._line}: {field}: is {has}; it should be {should}: correct "
            "or remove the line",
            param=field,
        )

    def count(self, field: str, least: int = 1) -> int:
        value = self._fields.get(field)
        try:
            number = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
        except ValueError:
            number = -1
        if not least <= number <= MAX_TOKENS:
            raise self.wrong(field, f"a whole number from {least} to {MAX_TOKENS}")
        return number

    def number(self, field: str, least: float = 0.0) -> float:
        value = self._fields.get(field)
        try:
            number = float(value) if isinstance(value, str | int | float) else -1.0
        except ValueError:
            number = -1.0
        if not least <= number < 1e15:
            raise self.wrong(field, f"a number of at least {least:g}")
        return number

    def text(self, field: str) -> str:
        value = self._fields.get(field)
        if not isinstance(value, str) or not value:
            raise self.wrong(field, "a text")
        return value

    def moment_s(self, field: str) -> float:
        value = self._fields.get(field)
        if isinstance(value, str):
            try:
                # Python reads up to six digits of a second.
                return datetime.fromisoformat(value[:26]).timestamp()
            except ValueError:
                pass
        raise self.wrong(field, "a moment such as 2023-11-16 18:17:03.979960")

    def blocks(self, field: str) -> tuple[int, ...]:
        value = self._fields.get(field, [])
        if not isinstance(value, list) or not all(
            type(block) is int and 0 <= block < 1 << 40 for block in value
        ):
            raise self.wrong(field, "a list of whole numbers, one for each 512 prompt tokens")
        return tuple(value)


def csv_lines(path: Path, columns: Iterable[str]) -> Iterator[Fields]:
    """Yield the lines of a CSV file that has at least `columns`."""
    with _open(path) as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise InvalidRequest(
                f"{path}: line 1: {missing[0]}: this column is missing; the header should have "
                f"{', '.join(columns)}",
                param=missing[0],
            )
        for row in reader:
            yield Fields(path, reader.line_num, row)


def _open(path: Path) -> Any:
    try:
        return path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(
            f"{path}: can't be read ({error.strerror}): check the path", param="trace"
        ) from error


def read_trace(path: Path, origins: Origins) -> Trace:
    """Return the trace at `path`, its format by its ending and header. Raises InvalidRequest.

    `origins` are where clients of a generated trace live.
    """
    if path.suffix in (".jsonl", ".json"):
        return _whole(path, _mooncake(path))
    if path.suffix == ".csv":
        with _open(path) as lines:
            header = lines.readline()
        if "rate_rps" in header:
            from placement.simulator.servegen import read_servegen

            return read_servegen(path, origins)
        return _whole(path, _azure(path))
    raise InvalidRequest(
        f"{path}: the format is unknown: it should be a .csv (Azure or ServeGen rates) or .jsonl "
        "(Mooncake) trace",
        param="trace",
    )


def _azure(path: Path) -> Iterator[Row]:
    for line in csv_lines(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        yield Row(line.moment_s("TIMESTAMP"), "", line.count("ContextTokens"), line.count("GeneratedTokens"))


def _mooncake(path: Path) -> Iterator[Row]:
    with _open(path) as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except ValueError as error:
                raise InvalidRequest(
                    f"{path}: line {number}: is not JSON ({error}): correct or remove the line", param="trace"
                ) from error
            if not isinstance(fields, dict):
                raise InvalidRequest(
                    f"{path}: line {number}: should be one JSON object a line", param="trace"
                )
            line = Fields(path, number, fields)
            yield Row(
                line.number("timestamp") / 1e3,
                "",
                line.count("input_length"),
                line.count("output_length"),
                line.blocks("hash_ids"),
            )


def _whole(path: Path, read: Iterator[Row]) -> Trace:
    every = sorted(read, key=lambda row: row.at_s)
    rows = [row for row in every if row.prompt_tokens + row.output_tokens < CONTEXT_TOKENS]
    if len(rows) < 2:
        raise InvalidRequest(
            f"{path}: holds fewer than two requests: nothing can be simulated", param="trace"
        )
    left_out = len(every) - len(rows)
    note = (
        f"{left_out} requests beyond the model's context of {CONTEXT_TOKENS} tokens left out"
        if left_out
        else ""
    )
    return Trace(path.stem, lambda least, rng: replicate(rows, least, rng), note)


def least_count(units: int, rps: float) -> int:
    return max(REQUESTS_A_UNIT * units, math.ceil(LEAST_SPAN_S * rps))


def replicate(rows: list[Row], least: int, rng: random.Random) -> list[Row]:
    """Return `rows`, with copies until there are `least`: each begins elsewhere, its prefixes are its own."""
    begin_s, span_s = rows[0].at_s, rows[-1].at_s - rows[0].at_s
    copies = max(1, -(-least // len(rows)))
    if copies * len(rows) > MAX_REQUESTS:
        raise InvalidRequest(
            f"the fleet would need {copies * len(rows)} requests; at most {MAX_REQUESTS} fit"
        )
    stride = 1 + max((block for row in rows for block in row.blocks), default=0)
    made = []
    for copy in range(copies):
        shift_s = rng.random() * span_s if copy else 0.0
        for row in rows:
            at_s = (row.at_s - begin_s + shift_s) % span_s if copy else row.at_s - begin_s
            blocks = tuple(block + copy * stride for block in row.blocks)
            made.append(row._replace(at_s=at_s, blocks=blocks))
    made.sort(key=lambda row: row.at_s)
    return made


def offered(rows: list[Row], rps: float, origins: Origins, rng: random.Random) -> list[Request]:
    """Return the requests of a run: `rows` with their time scaled so that `rps` of them come a second."""
    begin_s = rows[0].at_s
    scale = len(rows) / rps / max(rows[-1].at_s - begin_s, 1e-9)
    return [
        Request(
            (row.at_s - begin_s) * scale,
            row.tenant,
            row.origin or origins.draw(rng),
            row.prompt_tokens,
            row.output_tokens,
            row.blocks,
        )
        for row in rows
    ]
