"""What can happen to a generation (events) and what it asks for (effects): the words of `session.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.pipeline.events import Chunk
from grid.errors import GridError
from grid.wire.messages import Accepted, Done, WireMessage
from grid.words import Usage

# --- events ---------------------------------------------------------------------------------


class Start(NamedTuple):
    """Comes first, and once."""


class Placed(NamedTuple):
    """Placement chose a unit for an attempt, and reserved it."""

    attempt: int
    reservation_id: str
    unit_id: str


class NotPlaced(NamedTuple):
    attempt: int
    error: GridError


class Frames(NamedTuple):
    """What arrived on an attempt's link stream, in order."""

    attempt: int
    messages: Sequence[WireMessage]


class LinkLost(NamedTuple):
    """An attempt's link can't be opened or is gone."""

    attempt: int
    error: GridError


class Suspected(NamedTuple):
    """An attempt's unit is silent: perhaps it will never speak again."""

    attempt: int


class Leaving(NamedTuple):
    """An attempt's unit drains."""

    attempt: int


class Charged(NamedTuple):
    """What a unit says of an attempt that was given up."""

    cu_seconds: float


class ClientGone(NamedTuple):
    pass


class Tick(NamedTuple):
    """Time passed; asked for by `due_s`."""


Event = Start | Placed | NotPlaced | Frames | LinkLost | Suspected | Leaving | Charged | ClientGone | Tick


# --- effects --------------------------------------------------------------------------------


class Place(NamedTuple):
    """Find a unit for an attempt; answered by Placed or NotPlaced, unless it is given up."""

    attempt: int
    excluded: tuple[str, ...]
    emitted_tokens: int
    rest_tokens: int
    """Output tokens that are still to come, at most."""
    fingerprint: str = ""
    """Of the variant that greedy text goes on exactly on; "" where that says nothing."""
    is_hedge: bool = False
    """Another attempt lives, and may still have the next token."""


class SubmitTo(NamedTuple):
    """Send the request to the unit that was placed; answered by Frames or LinkLost."""

    attempt: int
    emitted_ids: tuple[int, ...]
    emitted_code_points: int
    rest_tokens: int
    prompt_hash: bytes


class Begin(NamedTuple):
    """A unit accepted: the client may be told that the answer starts."""

    attempt: int
    accepted: Accepted


class Moved(NamedTuple):
    """The answer goes on with another attempt, which has the next token."""

    attempt: int
    gap_s: float
    """Since the token before it; 0 where it is the first."""


class CancelUnit(NamedTuple):
    """Stop an attempt's work, and go on listening: its figures are waited for."""

    attempt: int


class GiveUp(NamedTuple):
    """Stop whatever an attempt is doing, and listen to it no more."""

    attempt: int
    is_charged: bool = False
    """Its work is paid for: what its unit says of that is fed back as `Charged`."""


class Settle(NamedTuple):
    reservation_id: str
    outcome: str
    """`done`, `failed`, `refused` or `cancelled`."""
    input_tokens: int
    output_tokens: int
    """Of this attempt, as are both times, since its placement."""
    ttft_ms: float
    total_ms: float
    cached_tokens: int = 0


class Finish(NamedTuple):
    finish_reason: str
    usage: Usage
    first_token_s: float
    """When the first token came; the end where none did."""
    figures: Done | None
    """Of the last attempt; None where a stop string ended the answer before the unit did."""
    stop: str = ""
    """The stop string that ended the answer."""
    moves: int = 0
    exact: bool = True
    """Greedy text is the same as an undisturbed run's; nothing that was not moved could differ."""


class Fail(NamedTuple):
    error: GridError
    usage: Usage


Effect = Place | SubmitTo | Begin | Chunk | Moved | CancelUnit | GiveUp | Settle | Finish | Fail
