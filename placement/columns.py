"""Units as rows, facts as columns: what filters and costs compute on. Storage only; no rule lives here.

Rows are dense: row i of every column is unit i, and the last row moves into the place of a removed one. A
column attribute is always exactly as long as the fleet, so that no reader needs a length or a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from grid.samples import COUNTS, READINGS, Floats, Ints

__all__ = ["FIRST_CAPACITY", "PRICED", "Columns", "Floats", "Ints", "Mask", "Names"]

Mask = npt.NDArray[np.bool_]

FIRST_CAPACITY = 16

_DTYPES: dict[str, Any] = {
    "task": np.int64,
    "model": np.int64,
    "region": np.int64,
    "precision": np.int64,
    "memory_grant_mb": np.int64,
    "context_tokens": np.int64,
    "max_running": np.int64,
    "slots": np.int64,
    "most_slots": np.int64,
    "drained": np.bool_,
    "isolated": np.bool_,
    "taken_in": np.bool_,
    "sampled_s": np.float64,
    "paced_ms": np.float64,
    "paced_steps": np.float64,
    "gap_ms": np.float64,
    "studied_s": np.float64,
    "listed_since": np.int64,
    "listed": np.int64,
    "relisted": np.bool_,
    "place": np.int64,
    "step_ms": np.float64,
    "step_ms_per_request": np.float64,
    "reported": np.int64,
    "released": np.int64,
    "unseen": np.int64,
    "unseen_prompt_tokens": np.int64,
    "unseen_kv_tokens": np.int64,
    "load": np.int64,
    "tokens_ahead": np.int64,
    "kv_tokens_held": np.int64,
    "kv_tokens_spare": np.int64,
}

PRICED = ("next_step_ms", "step_ms_per_kv_token", "first_steps", "prefill_ms_per_token", "wait_ms", "crowd")
"""What every price is made of."""

_BLOCKS: dict[str, tuple[tuple[str, ...], Any]] = {
    "priced": (PRICED, np.float64),
    "counts": (COUNTS, np.int64),
    "readings": (READINGS, np.float64),
}
"""Columns that are rows of one array, so that a part of the fleet is copied at once."""


class Columns:
    """One array a fact, one row a unit. Counts are integers, so that sums and differences stay exact."""

    # Fixed while a unit lives.
    task: Ints
    model: Ints
    """Number of the name in the view's `models`."""
    region: Ints
    """Number of the name in the view's `regions`."""
    precision: Ints
    memory_grant_mb: Ints
    context_tokens: Ints
    max_running: Ints
    slots: Ints
    """How many requests it is given at once, fewer while its memory is short."""
    most_slots: Ints
    """Otherwise: `loads.slots`."""
    # The newest sample: `UnitLoad` says what they are.
    state: Ints
    running: Ints
    waiting: Ints
    kv_tokens_free: Ints
    kv_tokens_total: Ints
    """0 where the engine keeps no KV cache or doesn't say."""
    prefill_tokens_queued: Ints
    steps: Ints
    sequence: Ints
    held_since: Ints
    admits: Ints
    decode_ms_per_token: Floats
    # What may change.
    drained: Mask
    """By an operator; the unit's own draining is a state."""
    isolated: Mask
    """Left alone because it failed too often."""
    taken_in: Mask
    """From standby, and its newest sample does not say so yet."""
    sampled_s: Floats
    """Observed time of the newest sample; -inf before the first."""
    studied_s: Floats
    """When a sample was last learned from."""
    listed_since: Ints
    """The newest list of reservations, as `UnitLoad.held_since` names it."""
    listed: Ints
    """How many are on it."""
    relisted: Mask
    """It came with a sample that is not counted yet."""
    place: Ints
    """Of no meaning between two uses: finds units that are twice in one batch."""
    step_ms: Floats
    step_ms_per_request: Floats
    reported: Ints
    """Requests that the newest sample holds."""
    released: Ints
    """Reservations in the newest sample that were settled since."""
    unseen: Ints
    """Reservations that the newest sample does not hold."""
    unseen_prompt_tokens: Ints
    unseen_kv_tokens: Ints
    # Made of these and kept rather than computed: a decision reads all rows, an event changes one.
    paced_ms: Floats
    """Time with requests running, up to the newest sample, older time fading."""
    paced_steps: Floats
    """Steps in it."""
    gap_ms: Floats
    """Time between steps lately: what those that run there feel between tokens. 0 for an idle unit."""
    load: Ints
    """Requests on each unit: reported, less those settled since, plus those not seen yet."""
    tokens_ahead: Ints
    """Prompt tokens to compute before another's: queued, and not seen yet."""
    kv_tokens_held: Ints
    """KV that each step reads: of the newest sample, and of those not seen yet."""
    kv_tokens_spare: Ints
    """What may come before memory gets short: free, less `cost.kv_tokens_kept` and those not seen yet."""
    next_step_ms: Floats
    """A step of the batch that the next request joins, without its own KV."""
    step_ms_per_kv_token: Floats
    first_steps: Floats
    prefill_ms_per_token: Floats
    wait_ms: Floats
    """Until the prompts ahead are computed."""
    crowd: Floats
    """How many must end before the next request gets a slot, in shares of all slots."""
    priced: Floats
    """The columns of PRICED, shape (6, units)."""
    counts: Ints
    """Those of COUNTS."""
    readings: Floats
    """Those of READINGS."""

    def __init__(self) -> None:
        self.size = 0
        self._full: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(FIRST_CAPACITY, dtype) for name, dtype in _DTYPES.items()
        }
        self._blocks: dict[str, npt.NDArray[Any]] = {
            name: np.zeros((len(rows), FIRST_CAPACITY), dtype) for name, (rows, dtype) in _BLOCKS.items()
        }
        self._show()

    def append(self) -> int:
        """Add a zeroed row and return its number."""
        if self.size == len(self._full["task"]):
            for name, column in self._full.items():
                self._full[name] = np.concatenate([column, np.zeros_like(column)])
            for name, block in self._blocks.items():
                self._blocks[name] = np.concatenate([block, np.zeros_like(block)], axis=1)
        row = self.size
        for column in self._full.values():
            column[row] = 0
        for block in self._blocks.values():
            block[:, row] = 0
        self.size += 1
        self._show()
        return row

    def remove(self, row: int) -> None:
        """Remove `row`; the last row takes its number."""
        last = self.size - 1
        for column in self._full.values():
            column[row] = column[last]
        for block in self._blocks.values():
            block[:, row] = block[:, last]
        self.size = last
        self._show()

    def _show(self) -> None:
        for name, column in self._full.items():
            setattr(self, name, column[: self.size])
        for block_name, (names, _) in _BLOCKS.items():
            block = self._blocks[block_name][:, : self.size]
            setattr(self, block_name, block)
            for name, column in zip(names, block, strict=True):
                setattr(self, name, column)


class Names:
    """Strings as small numbers, kept while held: a rule is asked once a name, not once a unit."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._holds: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def hold(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
                self._holds.append(0)
            self._numbers[name] = number
        self._holds[number] += 1
        return number

    def drop(self, number: int) -> None:
        """Undo one `hold`; the last one frees the number."""
        self._holds[number] -= 1
        if self._holds[number] == 0:
            del self._numbers[self._names[number]]
            self._free.append(number)

    def items(self) -> Iterable[tuple[str, int]]:
        return self._numbers.items()

    def number(self, name: str) -> int:
        """Return the number of `name`, or -1 when nothing holds it."""
        return self._numbers.get(name, -1)

    def where(self, rule: Callable[[str], bool]) -> Mask:
        """Return the answer of `rule` for each number, shape (numbers ever used at once,)."""
        answers = np.zeros(len(self._names), np.bool_)
        for name, number in self._numbers.items():
            answers[number] = rule(name)
        return answers
