"""What a placement policy is to the simulator: told of events in order, it answers with dispatches.

A policy may keep a request and dispatch it at a later event. What it never dispatches was never finished. It
may name no request twice and no unit that the request can't fit; the world asserts both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from placement.simulator.seen import Arrival, Dispatch, Ended, UnitInfo, UnitReport

RoundTripMs = Callable[[str, str], float]


@dataclass(frozen=True, slots=True)
class Setting:
    """What every policy knows from the start on."""

    units: tuple[UnitInfo, ...]
    round_trip_ms: RoundTripMs
    """Between two regions."""
    origins: tuple[str, ...]
    """Regions that clients come from."""
    home: str
    """Where the policy stands: reports come here."""


class Policy:
    """Base of all: by itself it hears nothing but arrivals."""

    name: ClassVar[str]
    source: ClassVar[str]
    """Where the rule and its defaults are published."""
    wants_reports: ClassVar[bool] = False
    wants_blocks: ClassVar[bool] = False
    """Whether reports say which prefix blocks came and went."""
    wants_first: ClassVar[bool] = False
    wants_ended: ClassVar[bool] = False

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        self.setting = setting
        self.units = setting.units
        self.rng = rng

    def fitting(self, arrival: Arrival) -> list[int]:
        """Return the units whose context the prompt fits, with at least one token of an answer."""
        tokens = arrival.prompt_tokens
        return [info.unit for info in self.units if info.context_tokens > tokens]

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        raise NotImplementedError

    def reported(self, reports: Sequence[UnitReport], now_s: float) -> Sequence[Dispatch]:
        return ()

    def first_token(self, request: int, unit: int, now_s: float) -> Sequence[Dispatch]:
        return ()

    def ended(self, ended: Ended, now_s: float) -> Sequence[Dispatch]:
        return ()
