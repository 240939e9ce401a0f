"""What each unit carries, as columns: its newest sample, what was settled since, what the sample misses.

All arithmetic on load lives here. `fleet.py` says which reservations count where; every change ends in
`cost.weigh`, so that what a decision reads always follows from what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from grid.words import Task, UnitCard, UnitLoad
from placement import cost
from placement.columns import Columns, Ints
from placement.learning import Here
from placement.reservations import Reservation
from placement.speeds import Speeds


def slots(card: UnitCard) -> int:
    """Return how many requests a unit is given at once. All others wait in placement's queue, so that each
    gets the unit that is free first.

    Texts are embedded in milliseconds, so the way back and forth would leave the unit idle: for each call
    that it works on, another is on its way or waits there. `max_waiting` beyond that is the unit's own
    margin, for what comes before placement knows that a slot is taken.
    """
    ahead = card.max_running if card.task == Task.EMBED else 0
    return card.max_running + min(ahead, card.max_waiting)


class Loads:
    """Writes to the rows of `columns`; `speeds` are always those of the row's unit, as published."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def here(self, row: int) -> Here:
        columns = self._columns
        return Here(
            columns.max_running.item(row),
            columns.load.item(row),
            columns.tokens_ahead.item(row),
            columns.kv_tokens_held.item(row),
        )

    def set_speeds(self, rows: Ints, speeds: Speeds) -> None:
        """Give the units at `rows` these speeds."""
        columns = self._columns
        columns.step_ms_per_kv_token[rows] = speeds.step_ms_per_kv_token
        columns.first_steps[rows] = speeds.first_steps
        columns.prefill_ms_per_token[rows] = speeds.prefill_ms_per_token
        weight = cost.weigh(
            speeds,
            columns.max_running[rows],
            columns.load[rows],
            columns.tokens_ahead[rows],
            columns.kv_tokens_held[rows],
        )
        columns.next_step_ms[rows], columns.wait_ms[rows], columns.crowd[rows] = weight

    def count(self, row: int, speeds: Speeds, load: UnitLoad, unseen: Sequence[Reservation]) -> None:
        """Take a new sample, or the absence of one; `unseen` are the reservations that it does not hold."""
        columns = self._columns
        prompt_tokens = kv_tokens = 0
        for reservation in unseen:
            prompt_tokens += reservation.prompt_tokens
            kv_tokens += reservation.kv_tokens
        # A unit still preparing a prompt holds its reservation before its engine counts the request.
        reported = max(load.running + load.waiting, len(load.reservations))
        columns.kv_tokens_free[row], columns.kv_tokens_total[row] = load.kv_tokens_free, load.kv_tokens_total
        columns.reported[row], columns.released[row], columns.unseen[row] = reported, 0, len(unseen)
        columns.unseen_prompt_tokens[row], columns.unseen_kv_tokens[row] = prompt_tokens, kv_tokens
        columns.kv_tokens_spare[row] = load.kv_tokens_free - cost.kv_tokens_kept(load) - kv_tokens
        carries = (
            reported + len(unseen),
            load.prefill_tokens_queued + prompt_tokens,
            max(load.kv_tokens_total - load.kv_tokens_free, 0) + kv_tokens,
        )
        columns.load[row], columns.tokens_ahead[row], columns.kv_tokens_held[row] = carries
        weight = cost.weigh(speeds, columns.max_running.item(row), *carries)
        columns.next_step_ms[row], columns.wait_ms[row], columns.crowd[row] = weight

    def charge(self, row: int, speeds: Speeds, reservation: Reservation, sign: int) -> None:
        """Add (+1) or take off (-1) a reservation that the newest sample does not hold."""
        columns = self._columns
        prompt_tokens, kv_tokens = sign * reservation.prompt_tokens, sign * reservation.kv_tokens
        columns.unseen[row] += sign
        columns.unseen_prompt_tokens[row] += prompt_tokens
        columns.unseen_kv_tokens[row] += kv_tokens
        columns.load[row] += sign
        columns.tokens_ahead[row] += prompt_tokens
        columns.kv_tokens_held[row] += kv_tokens
        columns.kv_tokens_spare[row] -= kv_tokens
        self._weigh(row, speeds)

    def release(self, row: int, speeds: Speeds) -> None:
        """Take off a request that the newest sample still holds; its KV stays until the next one."""
        self._columns.released[row] += 1
        self._columns.load[row] -= 1
        self._weigh(row, speeds)

    def _weigh(self, row: int, speeds: Speeds) -> None:
        columns = self._columns
        weight = cost.weigh(speeds, *self.here(row))
        columns.next_step_ms[row], columns.wait_ms[row], columns.crowd[row] = weight
