"""Who is asked to count a prompt's tokens, and what happens when they can't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fleet import make_card, make_load

from gateway.pipeline.counting import Counter, counting_units
from grid.errors import ContextOverflow, GridError, InternalError, NoEligibleUnit, Saturated, UnitLost
from grid.wire.messages import Count, Counted, Fleet, Pong, WireMessage
from grid.words import FleetUnit, Message, Task, UnitState

HELLO = (Message("user", "hello"),)


def unit(name: str, **fields: Any) -> FleetUnit:
    """Return a ready unit of model `m` in region `eu`, unless `fields` say otherwise."""
    sample = {key: fields.pop(key) for key in ("state", "running") if key in fields}
    card = make_card(name, **{"host": name, "region": "eu", "model": "m", **fields})
    return FleetUnit(card, make_load(card, **sample), 0, 1.0)


class Cell:
    """A fleet whose units answer, by name, what the test says."""

    def __init__(self, *units: FleetUnit, answers: dict[str, WireMessage | GridError] | None = None) -> None:
        self.fleet = Fleet(0, 1, units)
        self.answers = answers or {}
        self.asked: list[str] = []

    async def get(self, host: str, port: int) -> Any:
        return Line(self, host)

    async def count(self, *allowed_regions: str) -> int:
        return await Counter(placement=self, links=self).count("req_1", "m", HELLO, allowed_regions)


class Line:
    def __init__(self, cell: Cell, name: str) -> None:
        self._cell = cell
        self._name = name

    async def call(self, build: Callable[[int], WireMessage], timeout_s: float) -> WireMessage:
        assert build(7) == Count(7, "req_1", "m", HELLO)
        assert timeout_s > 0
        self._cell.asked.append(self._name)
        answer = self._cell.answers.get(self._name, Counted(7, 3))
        if isinstance(answer, GridError):
            raise answer
        return answer


def test_only_units_that_run_the_model_where_it_may_go() -> None:
    fleet = Fleet(
        0,
        1,
        (
            unit("busy", running=3),
            unit("idle"),
            unit("drains", state=UnitState.DRAINING, running=1),
            unit("spare", state=UnitState.ASLEEP, running=2),
            unit("starts", state=UnitState.STARTING),
            unit("dead", state=UnitState.FAILED),
            unit("other", model="x"),
            unit("embeds", task=Task.EMBED),
            unit("abroad", region="us"),
        ),
    )
    assert [each.card.unit_id for each in counting_units(fleet, "m", ("eu",))] == [
        *("idle", "drains", "spare", "busy")
    ]
    assert "abroad" in [each.card.unit_id for each in counting_units(fleet, "m", ())]


async def test_residency_leaves_nobody_rather_than_somebody_abroad() -> None:
    cell = Cell(unit("abroad", region="us"))
    with pytest.raises(NoEligibleUnit, match="eu"):
        await cell.count("eu")
    assert cell.asked == []


async def test_a_unit_that_is_lost_or_full_is_passed_over() -> None:
    cell = Cell(unit("a"), unit("b"), unit("c"), answers={"a": UnitLost("gone"), "b": Saturated("full")})
    assert await cell.count() == 3
    assert cell.asked == ["a", "b", "c"]


async def test_three_are_asked_and_no_more() -> None:
    cell = Cell(*(unit(name) for name in "abcd"), answers={name: UnitLost("gone") for name in "abcd"})
    with pytest.raises(UnitLost):
        await cell.count()
    assert cell.asked == ["a", "b", "c"]


async def test_what_a_unit_is_right_to_refuse_is_not_asked_elsewhere() -> None:
    cell = Cell(unit("a"), unit("b"), answers={"a": ContextOverflow("too long", prompt_tokens=100)})
    with pytest.raises(ContextOverflow):
        await cell.count()
    assert cell.asked == ["a"]


async def test_an_answer_of_another_kind_is_a_fault() -> None:
    with pytest.raises(InternalError, match="Pong"):
        await Cell(unit("a"), answers={"a": Pong(7, 0)}).count()
