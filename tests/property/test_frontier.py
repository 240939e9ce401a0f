"""Any acyclic wiring runs each step once, after what it uses, and holds none back longer than that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pipeline.contract import MAX_STEPS, Contract, parse
from gateway.pipeline.frontier import Frontier


@st.composite
def wirings(draw: st.DrawFn) -> list[list[int] | None]:
    """For each step the places of the earlier steps that it uses; None: all of them."""
    count = draw(st.integers(1, MAX_STEPS))
    return [
        draw(
            st.one_of(
                st.none(),
                st.lists(st.integers(0, place - 1), unique=True) if place else st.just([]),
            )
        )
        for place in range(count)
    ]


def contract_of(wiring: list[list[int] | None]) -> Contract:
    steps: list[dict[str, Any]] = [
        {
            "type": "retrieval",
            "source": "kb",
            "id": f"s{place}",
            **({} if used is None else {"uses": [f"s{earlier}" for earlier in used]}),
        }
        for place, used in enumerate(wiring)
    ]
    return parse(Contract, json.dumps({"pipeline": {"steps": steps}}).encode())


@given(wirings(), st.data())
def test_each_step_runs_once_after_what_it_uses(wiring: list[list[int] | None], data: st.DataObject) -> None:
    uses = contract_of(wiring).pipeline.uses
    meant = {
        f"s{place}": {f"s{earlier}" for earlier in (range(place) if used is None else used)}
        for place, used in enumerate(wiring)
    }
    assert uses == meant
    frontier = Frontier(uses)
    began: list[str] = []
    running: list[str] = []
    ended: set[str] = set()
    while not frontier.is_done:
        ready = frontier.begin()
        for step_id in ready:
            assert meant[step_id] <= ended
        began += ready
        running += ready
        held_back = [s for s in meant if s not in began and meant[s] <= ended]
        assert not held_back
        assert running, "some step can always begin"
        step_id = running.pop(data.draw(st.integers(0, len(running) - 1)))
        frontier.ended(step_id)
        ended.add(step_id)
    assert sorted(began) == sorted(meant)
    assert frontier.begin() == []


def test_a_step_ends_once() -> None:
    frontier = Frontier({"a": ()})
    with pytest.raises(KeyError):
        frontier.ended("a")
    assert frontier.begin() == ["a"]
    frontier.ended("a")
    with pytest.raises(KeyError):
        frontier.ended("a")
