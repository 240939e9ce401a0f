"""How many tokens a prompt has: asked of a unit, because the gateway has no tokenizer. Reserves nothing.

Any unit that runs the model gives the same answer, so the fleet view is enough to find one, and placement
isn't asked: counting is no load worth placing. Residency holds here as everywhere: the prompt travels.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.pipeline.delivery import Links
from grid.errors import InternalError, NoEligibleUnit, Saturated, UnitLost
from grid.wire.messages import Count, Counted, Fleet
from grid.words import FleetUnit, Message, Task, UnitState

MAX_ATTEMPTS = 3
"""Units asked for one count, as for one generation."""
TIMEOUT_S = 10.0
"""All attempts together: the longest prompt is tokenised in a fraction of a second."""


class Fleets(Protocol):
    """What is needed of `placement.client.PlacementClient`."""

    @property
    def fleet(self) -> Fleet: ...


class Counter:
    def __init__(self, *, placement: Fleets, links: Links) -> None:
        self._placement = placement
        self._links = links

    async def count(
        self,
        request_id: str,
        model: str,
        messages: tuple[Message, ...],
        allowed_regions: tuple[str, ...],
        documents: tuple[str, ...] = (),
        max_output_tokens: int = 0,
    ) -> int:
        """Return the tokens of the prompt that `model` makes of `messages` and as many of `documents`, best
        first, as leave room for an answer.

        Raises ContextOverflow with the counts for one that can't fit, NoEligibleUnit without a unit in the
        allowed regions, Saturated or UnitLost when every unit that was asked is, DeadlineExceeded.
        """
        asked = counting_units(self._placement.fleet, model, allowed_regions)[:MAX_ATTEMPTS]
        if not asked:
            where = f" in {', '.join(allowed_regions)}" if allowed_regions else ""
            raise NoEligibleUnit(f"no unit that runs {model!r}{where} can count tokens now")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + TIMEOUT_S
        for unit in asked:
            try:
                link = await self._links.get(unit.card.host, unit.card.port)
                reply = await link.call(
                    lambda stream: Count(stream, request_id, model, messages, documents, max_output_tokens),
                    deadline_s - loop.time(),
                )
            except (UnitLost, Saturated):
                if unit is asked[-1]:
                    raise
                continue
            if not isinstance(reply, Counted):
                raise InternalError(f"a unit answered a count with {type(reply).__name__}")
            return reply.prompt_tokens
        raise AssertionError("the last attempt returns or raises")


COUNTING = (UnitState.READY, UnitState.DRAINING, UnitState.STANDBY, UnitState.ASLEEP)
"""States in which a unit has its tokenizer: a count is no work, and takes nobody in."""


def counting_units(fleet: Fleet, model: str, allowed_regions: tuple[str, ...]) -> list[FleetUnit]:
    """Return who may be asked, the least busy first. One that drains or is on standby counts, too."""
    able = [
        unit
        for unit in fleet.units
        if unit.card.task == Task.GENERATE
        and unit.card.model == model
        and unit.load.state in COUNTING
        and (not allowed_regions or unit.card.region in allowed_regions)
    ]
    return sorted(able, key=lambda unit: (unit.load.running + unit.load.waiting, unit.card.unit_id))
