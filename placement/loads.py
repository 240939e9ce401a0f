"""What each unit carries, as columns: its newest sample, what was settled since, what the sample misses.

All arithmetic on load lives here. `fleet.py` says which reservations count where; every change ends in
`cost.weigh`, so that what a decision reads always follows from what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grid.words import Task, UnitCard
from placement import cost
from placement.columns import Columns, Floats, Ints
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


PACE_KEPT = 0.9
"""Of a unit's pace, with each sample: what counts is the last second."""


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
        columns.step_ms[rows] = speeds.step_ms
        columns.step_ms_per_request[rows] = speeds.step_ms_per_request
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

    def miss(self, row: int, unseen: Sequence[Reservation]) -> None:
        """Set which reservations the newest sample does not hold; `count` follows."""
        columns, prompt_tokens, kv_tokens = self._columns, 0, 0
        for reservation in unseen:
            prompt_tokens += reservation.prompt_tokens
            kv_tokens += reservation.kv_tokens
        columns.unseen[row], columns.unseen_prompt_tokens[row] = len(unseen), prompt_tokens
        columns.unseen_kv_tokens[row] = kv_tokens

    def count(self, rows: Ints) -> None:
        """Add up what the newest samples of these units hold and miss."""
        columns = self._columns
        # A unit still preparing a prompt holds its reservation before its engine counts the request.
        reported = np.maximum(columns.running[rows] + columns.waiting[rows], columns.listed[rows])
        free, total = columns.kv_tokens_free[rows], columns.kv_tokens_total[rows]
        unseen_kv_tokens = columns.unseen_kv_tokens[rows]
        columns.reported[rows], columns.released[rows] = reported, 0
        admits, most = columns.admits[rows], columns.most_slots[rows]
        columns.slots[rows] = np.where(admits > 0, np.minimum(admits, most), most)
        columns.kv_tokens_spare[rows] = free - cost.kv_tokens_kept(total) - unseen_kv_tokens
        load = columns.load[rows] = reported + columns.unseen[rows]
        ahead = columns.prefill_tokens_queued[rows] + columns.unseen_prompt_tokens[rows]
        columns.tokens_ahead[rows] = ahead
        held = columns.kv_tokens_held[rows] = np.maximum(total - free, 0) + unseen_kv_tokens
        speeds = cost.SpeedsOf(
            columns.step_ms[rows],
            columns.step_ms_per_request[rows],
            columns.step_ms_per_kv_token[rows],
            columns.prefill_ms_per_token[rows],
        )
        weight = cost.weigh(speeds, columns.max_running[rows], load, ahead, held)
        columns.next_step_ms[rows], columns.wait_ms[rows], columns.crowd[rows] = weight

    def pace(self, rows: Ints, elapsed_ms: Floats, steps: Ints) -> None:
        """Take in how long it was since the last samples of these units, and how many steps they did."""
        columns = self._columns
        ran_ms = elapsed_ms * (columns.running[rows] > 0)
        paced_ms = columns.paced_ms[rows] = PACE_KEPT * columns.paced_ms[rows] + ran_ms
        paced_steps = columns.paced_steps[rows] = PACE_KEPT * columns.paced_steps[rows] + steps
        columns.gap_ms[rows] = paced_ms / np.maximum(paced_steps, 1.0)

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
