"""The stream machine: the one owner of a generation, from its first placement to its one end. Pure.

    PLACING ──placed──▶ SUBMITTED ──accepted──▶ STREAMING ──end of text──▶ ENDING ──▶ ENDED
       ▲                    │
       └─ refused, unit lost┘  (bounded; only before a unit accepted)

`Session.handle(event, now_s)` returns effects; `delivery.py` carries them out and feeds back what happened.
Every path reaches ENDED with exactly one `Finish` or `Fail` (none where the client left: nobody listens),
and every reservation that was placed gets exactly one `Settle`. Token indices are contiguous: a gap is a
fault of the unit and fails the stream. Frames of an attempt other than the current one are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple

from gateway.pipeline.chunks import Chunker
from gateway.pipeline.events import Chunk
from gateway.pipeline.stops import StopFilter
from grid.errors import DeadlineExceeded, GridError, InternalError, NoEligibleUnit, Rejected, UnitLost, revive
from grid.wire.messages import Accepted, Done, Failed, Progress, Refused, Tokens, WireMessage
from grid.words import FinishReason, Usage

MAX_ATTEMPTS = 3
"""Placements of one generation before its caller hears of the refusal: a full unit is often full only for
the moment between two reports, and three say that the cell is."""

FIGURES_WAIT_S = 0.25
"""After a stop string the unit is cancelled and its figures awaited: a round trip, unless it hangs."""


class Phase(Enum):
    PLACING = auto()
    SUBMITTED = auto()
    STREAMING = auto()
    ENDING = auto()
    """All text is there; its tail, or the unit's figures, are still to come."""
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Order:
    """What a session must know of its generation. Times are the loop's monotonic seconds."""

    max_output_tokens: int
    stops: tuple[str, ...]
    min_tokens_per_chunk: int
    max_latency_s: float
    flush_on_eos: bool
    deadline_s: float


# --- events ---------------------------------------------------------------------------------


class Placed(NamedTuple):
    """Placement chose a unit for the current attempt, and reserved it."""

    reservation_id: str
    unit_id: str


class NotPlaced(NamedTuple):
    error: GridError


class Frames(NamedTuple):
    """What arrived on the current attempt's link stream, in order."""

    messages: Sequence[WireMessage]


class LinkLost(NamedTuple):
    """The current attempt's link can't be opened or is gone."""

    error: GridError


class ClientGone(NamedTuple):
    pass


class Tick(NamedTuple):
    """Time passed; asked for by `due_s`."""


Event = Placed | NotPlaced | Frames | LinkLost | ClientGone | Tick


# --- effects --------------------------------------------------------------------------------


class Begin(NamedTuple):
    """A unit accepted: the client may be told that the answer starts."""

    accepted: Accepted


class CancelUnit(NamedTuple):
    attempt: int


class Settle(NamedTuple):
    reservation_id: str
    outcome: str
    """`done`, `failed`, `refused` or `cancelled`."""
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    total_ms: float
    """Both since the placement of this attempt."""
    cached_tokens: int = 0


class Finish(NamedTuple):
    finish_reason: str
    usage: Usage
    first_token_s: float
    """When the first token came; the end where none did."""
    figures: Done | None
    """None where a stop string ended the answer before the unit did."""
    stop: str = ""
    """The stop string that ended the answer."""


class Fail(NamedTuple):
    error: GridError
    usage: Usage


Effect = Begin | Chunk | CancelUnit | Settle | Finish | Fail


class Session:
    """One generation. While `phase` is PLACING its shell places `attempt`, without the `excluded` units."""

    def __init__(self, order: Order) -> None:
        self.phase = Phase.PLACING
        self.attempt = 1
        self.excluded: tuple[str, ...] = ()
        self.late_frames = 0
        """Frames of attempts that were given up."""
        self.emitted_ids: list[int] = []
        """Every output id received, in order: what a continuation starts from."""
        self.received_code_points = 0
        self.accepted: Accepted | None = None
        self._order = order
        self._chunker = Chunker(order.min_tokens_per_chunk, order.max_latency_s, order.flush_on_eos)
        self._stops = StopFilter(order.stops) if order.stops else None
        self._refusal: GridError | None = None
        """Why the attempt before this one was not accepted."""
        self._placed: Placed | None = None
        """The reservation that still has to be settled."""
        self._placed_s = 0.0
        self._first_token_s = math.nan
        self._fresh: list[str] = []
        self._fresh_tokens = 0
        self._finish_reason = ""
        self._stop = ""
        self._figures: Done | Failed | None = None
        self._figures_due_s = math.inf
        self._cancel_sent = False
        self._effects: list[Effect] = []

    @property
    def due_s(self) -> float:
        """When `Tick` has to come next."""
        due_s = min(self._order.deadline_s, self._figures_due_s)
        held_s = self._chunker.due_s
        return due_s if held_s is None else min(due_s, held_s)

    @property
    def usage(self) -> Usage:
        """What the unit said until now, but never more output than was received: a stop string ends the
        charge."""
        output_tokens = len(self.emitted_ids)
        if self._figures is not None:
            figures = self._figures
            return Usage(figures.input_tokens, figures.cached_tokens, output_tokens, figures.cu_seconds)
        if self.accepted is None:
            return Usage()
        return Usage(self.accepted.prompt_tokens, self.accepted.cached_tokens, output_tokens, 0.0)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event at `now_s` and return what is to be done, in order. After the end: nothing."""
        if self.phase is Phase.ENDED:
            return []
        self._HANDLERS[type(event)](self, event, now_s)
        effects, self._effects = self._effects, []
        return effects

    # --- events ---------------------------------------------------------------------------------

    def _on_placed(self, event: Placed, now_s: float) -> None:
        assert self.phase is Phase.PLACING
        self.phase = Phase.SUBMITTED
        self._placed = event
        self._placed_s = now_s

    def _on_not_placed(self, event: NotPlaced, now_s: float) -> None:
        assert self.phase is Phase.PLACING
        error = event.error
        if self._refusal is not None and isinstance(error, NoEligibleUnit):
            error = self._refusal  # the units that could run it are the ones that just refused
        self._fail(error, now_s)

    def _on_link_lost(self, event: LinkLost, now_s: float) -> None:
        self._effects.append(CancelUnit(self.attempt))  # the link may be there, and only its stream be lost
        if self.phase is Phase.SUBMITTED:
            self._try_elsewhere(event.error, "failed", now_s)
        elif self.phase is Phase.ENDING:
            self._figures_due_s = -math.inf
            self._close(now_s)
        else:
            self._fail(event.error, now_s)

    def _on_client_gone(self, _: ClientGone, now_s: float) -> None:
        if self._placed is not None:
            self._effects.append(CancelUnit(self.attempt))
            self._settle("cancelled", now_s)
        self.phase = Phase.ENDED

    def _on_tick(self, _: Tick, now_s: float) -> None:
        if now_s < self._order.deadline_s:
            chunk = self._chunker.tick(now_s)
            if chunk is not None:
                self._effects.append(chunk)
        elif self.phase is Phase.ENDING:
            self._flush()
            self._figures_due_s = -math.inf
        else:
            if self._placed is not None:
                self._effects.append(CancelUnit(self.attempt))
            self._fail(DeadlineExceeded("the request's time is up before its answer was complete"), now_s)
        if self.phase is Phase.ENDING:
            self._close(now_s)

    def _on_frames(self, event: Frames, now_s: float) -> None:
        for message in event.messages:
            if self.phase is Phase.ENDED or self.phase is Phase.PLACING:
                self.late_frames += 1
                continue
            take = self._FRAMES.get(type(message))
            if take is None:
                self._fault(f"a {type(message).__name__} frame on a generation's stream", now_s)
            elif getattr(message, "attempt", self.attempt) != self.attempt:  # only `refused` carries none
                self.late_frames += 1
            else:
                take(self, message, now_s)
        if self._fresh or self._fresh_tokens:
            self._let_go(now_s)
        if self.phase is Phase.ENDING:
            self._close(now_s)

    # --- frames ---------------------------------------------------------------------------------

    def _accept(self, message: Accepted, now_s: float) -> None:
        if self.phase is not Phase.SUBMITTED:
            self._fault("a second `accepted`", now_s)
            return
        self.phase = Phase.STREAMING
        self.accepted = message
        self._effects.append(Begin(message))

    def _refused(self, message: Refused, now_s: float) -> None:
        if self.phase is not Phase.SUBMITTED:
            self._fault("`refused` after `accepted`", now_s)
            return
        error = message.error()
        self._try_elsewhere(error, "refused", now_s)

    def _tokens(self, message: Tokens, now_s: float) -> None:
        ids, text = message.ids, message.text
        if self.phase is not Phase.STREAMING:
            if self.phase is Phase.SUBMITTED:
                self._fault("tokens before `accepted`", now_s)
            return
        received, coming = len(self.emitted_ids), len(ids)
        if message.first_index != received:
            self._fault(f"token {message.first_index} came where {received} was next", now_s)
            return
        if received + coming > self._order.max_output_tokens:
            self._fault(f"more than {self._order.max_output_tokens} output tokens", now_s)
            return
        if not received:
            self._first_token_s = now_s
        self.emitted_ids.extend(ids)
        self.received_code_points += len(text)
        if self._stops is None:
            self._fresh.append(text)
            self._fresh_tokens += coming
            return
        text, tokens, self._stop = self._stops.push(text, coming)
        self._fresh.append(text)
        self._fresh_tokens += tokens
        if self._stop:
            self._figures_due_s = now_s + FIGURES_WAIT_S
            self._end_text(FinishReason.STOP, now_s)

    def _done(self, message: Done, now_s: float) -> None:
        if self.phase is Phase.SUBMITTED:
            self._fault("`done` before `accepted`", now_s)
        elif self.phase is Phase.STREAMING and message.output_tokens != len(self.emitted_ids):
            self._fault(f"`done` counts {message.output_tokens} tokens of {len(self.emitted_ids)}", now_s)
        else:
            self._figures = message
            if self.phase is Phase.STREAMING:
                self._release_held()
                self._end_text(message.finish_reason, now_s)

    def _failed(self, message: Failed, now_s: float) -> None:
        if self.phase is Phase.ENDING:
            self._figures = message
            return
        error = revive(message.code, message.message)
        if self.phase is Phase.SUBMITTED:
            self._try_elsewhere(error, "failed", now_s)
        else:
            self._figures = message
            self._fail(error, now_s)

    def _progress(self, message: Progress, now_s: float) -> None:
        """The stream is alive; nothing to say."""

    # --- text -----------------------------------------------------------------------------------

    def _let_go(self, now_s: float) -> None:
        """Hand what came in this turn to the chunker, as one piece."""
        text = self._fresh[0] if len(self._fresh) == 1 else "".join(self._fresh)
        chunk = self._chunker.push(text, self._fresh_tokens, now_s)
        self._fresh.clear()
        self._fresh_tokens = 0
        if chunk is not None:
            self._effects.append(chunk)

    def _release_held(self) -> None:
        if self._stops is not None:
            held = self._stops.finish()
            self._fresh.append(held.text)
            self._fresh_tokens += held.tokens

    def _end_text(self, reason: str, now_s: float) -> None:
        self.phase = Phase.ENDING
        self._finish_reason = reason
        self._let_go(now_s)
        chunk = self._chunker.finish()
        if chunk is not None:
            self._effects.append(chunk)

    def _flush(self) -> None:
        chunk = self._chunker.flush()
        if chunk is not None:
            self._effects.append(chunk)

    # --- ends -----------------------------------------------------------------------------------

    def _close(self, now_s: float) -> None:
        """All text is known: settle once the figures are there or late, finish once the tail has left."""
        if self._figures is None and self._placed is not None and now_s < self._figures_due_s:
            if not self._cancel_sent:
                self._cancel_sent = True
                self._effects.append(CancelUnit(self.attempt))
            return
        self._settle("done", now_s)
        self._figures_due_s = math.inf
        if self._chunker.due_s is None:
            self.phase = Phase.ENDED
            first_s = now_s if math.isnan(self._first_token_s) else self._first_token_s
            figures = self._figures if isinstance(self._figures, Done) else None
            self._effects.append(Finish(self._finish_reason, self.usage, first_s, figures, self._stop))

    def _try_elsewhere(self, error: GridError, outcome: str, now_s: float) -> None:
        """Before anything was accepted: place again without this unit, or end with `error`."""
        assert self._placed is not None
        if not isinstance(error, Rejected | UnitLost) or self.attempt == MAX_ATTEMPTS:
            self._fail(error, now_s, outcome)
            return
        self._refusal = error
        self.excluded += (self._placed.unit_id,)
        self._settle(outcome, now_s)
        self.phase = Phase.PLACING
        self.attempt += 1

    def _fault(self, what: str, now_s: float) -> None:
        self._effects.append(CancelUnit(self.attempt))
        self._fail(InternalError(f"a unit broke the stream protocol: {what}"), now_s)

    def _fail(self, error: GridError, now_s: float, outcome: str = "failed") -> None:
        """End with `error`, after everything that was received: no token is lost."""
        self._release_held()
        if self._fresh or self._fresh_tokens:
            self._let_go(now_s)
        self._flush()
        self._settle(outcome, now_s)
        self.phase = Phase.ENDED
        self._effects.append(Fail(error, self.usage))

    def _settle(self, outcome: str, now_s: float) -> None:
        placed, self._placed = self._placed, None
        if placed is None:
            return
        usage = self.usage
        ttft_s = self._first_token_s - self._placed_s if self.emitted_ids else 0.0
        self._effects.append(
            Settle(
                placed.reservation_id,
                outcome,
                usage.input_tokens,
                usage.output_tokens,
                ttft_s * 1000,
                (now_s - self._placed_s) * 1000,
                usage.cached_tokens,
            )
        )

    _HANDLERS: ClassVar[dict[type, Callable[[Session, Any, float], None]]] = {
        Placed: _on_placed,
        NotPlaced: _on_not_placed,
        Frames: _on_frames,
        LinkLost: _on_link_lost,
        ClientGone: _on_client_gone,
        Tick: _on_tick,
    }
    _FRAMES: ClassVar[dict[type, Callable[[Session, Any, float], None]]] = {
        Tokens: _tokens,
        Accepted: _accept,
        Refused: _refused,
        Progress: _progress,
        Done: _done,
        Failed: _failed,
    }
