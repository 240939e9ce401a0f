"""The stream machine: the one owner of a generation, from its first placement to its one end. Pure.

    OPENING ──accepted──▶ STREAMING ──end of text──▶ ENDING ──figures, or late──▶ ENDED

An answer is made by attempts (`attempts.py`), each placed, submitted and accepted on one unit. When its unit
is lost, a new attempt goes on after the ids that were received, at the next index. When its unit is only in
doubt, or drains, a second attempt lives beside the first: whichever advances the next index first has the
answer, and the other is given up.

`Session.handle(event, now_s)` returns effects; `delivery.py` carries them out and feeds back what happened.
Every path reaches ENDED with exactly one `Finish` or `Fail` (none where the client left: nobody listens),
and every reservation that was placed gets exactly one `Settle`. Token indices are contiguous: an attempt
that leaves a gap, repeats or says too much is at fault and given up. Frames of an attempt that was given up
are dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from gateway.pipeline import stream as st
from gateway.pipeline.answer import Answer
from gateway.pipeline.attempts import Attempt, Attempts, Stage
from gateway.pipeline.chunks import Chunker
from grid.errors import (
    Cancelled,
    DeadlineExceeded,
    GridError,
    InternalError,
    InvalidRequest,
    NoEligibleUnit,
    Rejected,
    UnitLost,
    revive,
)
from grid.wire.messages import Accepted, Done, Failed, Progress, Refused, Tokens
from grid.words import FinishReason, Usage

FIGURES_WAIT_S = 0.25
"""After a stop string the unit is cancelled and its figures awaited: a round trip, unless it hangs."""

PLACE_AGAIN_S = 0.25
"""Between two placements of an answer that has begun and that no unit can go on with now."""

CONTINUE_WITHIN_S = 15.0
"""How long a broken answer waits for a unit: a lost one is back, or another is free, within seconds, and a
reader that has seen nothing for longer has given up."""

MOVE_AGAIN_S = 1.0
"""Between two tries to leave a unit that drains; meanwhile it goes on answering."""

SHORT_REST_TOKENS = 16
"""An answer that has no more to come stays on a unit that drains: moving it costs a prefill."""

TRIED_ELSEWHERE = (Rejected, UnitLost, InternalError)
"""What another unit may do better, as long as nobody has accepted."""


CALLERS_DOING = (DeadlineExceeded, Cancelled, InvalidRequest)
"""Ends of an attempt that say nothing about its unit."""


class Phase(Enum):
    OPENING = auto()
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
    is_greedy: bool = True
    bound_by: str = ""
    """What makes an answer depend on its unit once it has begun, so that no other can go on with it."""


class Session:
    """One generation."""

    def __init__(self, order: Order) -> None:
        self.phase = Phase.OPENING
        self._chunker = Chunker(order.min_tokens_per_chunk, order.max_latency_s, order.flush_on_eos)
        self.answer = Answer(order.stops, self._chunker)
        self.accepted: Accepted | None = None
        """By the first unit that did."""
        self.moves = 0
        self.late_frames = 0
        """Frames of attempts that were given up."""
        self._order = order
        self._attempts = Attempts()
        self._speaker: Attempt | None = None
        """The attempt that brought the newest token; before any, the first that was accepted."""
        self._fingerprints: set[str] = set()
        """Of the units that the answer's tokens came from."""
        self._parts = 0
        """Attempts that the answer has tokens of."""
        self._loss: GridError | None = None
        """Why the newest attempt that ended early did."""
        self._broken_s = math.nan
        """Since when an answer that has begun is without a unit."""
        self._place_due_s = self._move_due_s = self._figures_due_s = math.inf
        self._finish_reason = ""
        self._figures: Done | Failed | None = None
        self._cu_seconds = 0.0
        """Of attempts before the last."""
        self._cancel_sent = False
        self._effects: list[st.Effect] = []

    @property
    def due_s(self) -> float:
        """When `Tick` has to come next."""
        due_s = min(self._order.deadline_s, self._figures_due_s, self._place_due_s, self._move_due_s)
        held_s = self._chunker.due_s
        return due_s if held_s is None else min(due_s, held_s)

    @property
    def usage(self) -> Usage:
        """What the units said until now, but never more output than was received: a stop string ends the
        charge. The prompt is charged once, however often it was computed."""
        accepted, figures = self.accepted, self._figures
        if accepted is None:
            return Usage()
        cached_tokens, cu_seconds = accepted.cached_tokens, self._cu_seconds
        if figures is not None:
            cached_tokens = min(figures.cached_tokens, accepted.prompt_tokens)
            cu_seconds += figures.cu_seconds
        return Usage(accepted.prompt_tokens, cached_tokens, len(self.answer.ids), cu_seconds)

    @property
    def exact(self) -> bool:
        return self._parts <= 1 or (self._order.is_greedy and len(self._fingerprints) == 1)

    def can_hedge(self, number: int) -> bool:
        """Say whether `Suspected` would open a second attempt beside this one."""
        attempt = self._attempts.find(number)
        return attempt is not None and self._can_open_beside(attempt)

    def handle(self, event: st.Event, now_s: float) -> list[st.Effect]:
        """Take one event at `now_s` and return what is to be done, in order. After the end: nothing."""
        if self.phase is Phase.ENDED:
            return []
        self._HANDLERS[type(event)](self, event, now_s)
        effects, self._effects = self._effects, []
        return effects

    # --- placement ------------------------------------------------------------------------------

    def _on_start(self, _: st.Start, now_s: float) -> None:
        self._open()

    def _on_placed(self, event: st.Placed, now_s: float) -> None:
        attempt = self._attempts.find(event.attempt)
        if attempt is None:  # given up while its decision was on its way
            self._effects.append(st.Settle(event.reservation_id, "cancelled", 0, 0, 0.0, 0.0))
            return
        assert attempt.stage is Stage.PLACING
        attempt.stage, attempt.placed_s = Stage.SUBMITTED, now_s
        attempt.reservation_id, attempt.unit_id = event.reservation_id, event.unit_id
        if self.phase is Phase.STREAMING and not self._rest_tokens:
            self._give_up(attempt, "cancelled", now_s)  # the other has said all, and lacks only its end
            return
        if attempt.takes_over:
            for other in self._others(attempt):
                self._give_up(other, "cancelled", now_s, is_charged=True)
        answer = self.answer
        attempt.first_index = len(answer.ids)
        prompt_hash = self.accepted.prompt_hash if self.accepted is not None and answer.ids else b""
        self._effects.append(
            st.SubmitTo(attempt.number, tuple(answer.ids), answer.code_points, self._rest_tokens, prompt_hash)
        )

    def _on_not_placed(self, event: st.NotPlaced, now_s: float) -> None:
        attempt = self._attempts.find(event.attempt)
        if attempt is None:
            return
        self._attempts.found_none(attempt)
        if self._attempts.live:
            if attempt.takes_over:
                self._move_due_s = now_s + MOVE_AGAIN_S
        elif self.phase is Phase.STREAMING:
            self._wait_for_unit(event.error, now_s)
        elif self._loss is not None and isinstance(event.error, NoEligibleUnit):
            self._fail(self._loss, now_s)  # the units that could run it are the ones that just refused
        else:
            self._fail(event.error, now_s)

    # --- what others see of a unit ----------------------------------------------------------------

    def _on_link_lost(self, event: st.LinkLost, now_s: float) -> None:
        attempt = self._attempts.find(event.attempt)
        if attempt is None:
            return
        if self.phase is Phase.ENDING:
            self._figures_due_s = -math.inf
            self._close(now_s)
        else:
            self._lose(attempt, event.error, "failed", now_s)

    def _on_suspected(self, event: st.Suspected, now_s: float) -> None:
        attempt = self._attempts.find(event.attempt)
        if attempt is not None and self._can_open_beside(attempt):
            attempt.is_suspect = True
            self._open()

    def _on_leaving(self, event: st.Leaving, now_s: float) -> None:
        attempt = self._attempts.find(event.attempt)
        if attempt is not None:
            attempt.is_leaving = True
            self._leave(attempt, now_s)

    def _on_charged(self, event: st.Charged, now_s: float) -> None:
        self._cu_seconds += event.cu_seconds

    # --- client and clock -------------------------------------------------------------------------

    def _on_client_gone(self, _: st.ClientGone, now_s: float) -> None:
        for attempt in list(self._attempts.live):
            self._give_up(attempt, "cancelled", now_s, is_charged=attempt is self._speaker)
        self.phase = Phase.ENDED

    def _on_tick(self, _: st.Tick, now_s: float) -> None:
        if now_s < self._order.deadline_s:
            chunk = self.answer.tick(now_s)
            if chunk is not None:
                self._effects.append(chunk)
            if now_s >= self._place_due_s:
                self._place_due_s = math.inf
                self._open()
            if now_s >= self._move_due_s:
                self._move_due_s = math.inf
                for attempt in list(self._attempts.live):
                    self._leave(attempt, now_s)
        elif self.phase is Phase.ENDING:
            self._effects += self.answer.flush(now_s)
            self._figures_due_s = -math.inf
        else:
            self._fail(DeadlineExceeded("the request's time is up before its answer was complete"), now_s)
        if self.phase is Phase.ENDING:
            self._close(now_s)

    # --- frames ---------------------------------------------------------------------------------

    def _on_frames(self, event: st.Frames, now_s: float) -> None:
        attempt = self._attempts.find(event.attempt)
        for message in event.messages:
            # A frame may end its own attempt, and with it those behind.
            if attempt is None or self.phase is Phase.ENDED or attempt not in self._attempts.live:
                self.late_frames += 1
                continue
            take = self._FRAMES.get(type(message))
            if take is None:
                self._fault(attempt, f"a {type(message).__name__} frame on a generation's stream", now_s)
            elif getattr(message, "attempt", event.attempt) != event.attempt:  # only `refused` carries none
                self.late_frames += 1
            else:
                take(self, attempt, message, now_s)
        chunk = self.answer.let_go(now_s) if self.phase is Phase.STREAMING else None
        if chunk is not None:
            self._effects.append(chunk)
        if self.phase is Phase.ENDING:
            self._close(now_s)

    def _accept(self, attempt: Attempt, message: Accepted, now_s: float) -> None:
        if attempt.stage is not Stage.SUBMITTED:
            self._fault(attempt, "a second `accepted`", now_s)
            return
        first = self.accepted
        if first is not None and attempt.first_index and message.prompt_hash != first.prompt_hash:
            self._fault(attempt, "its prompt differs from the one that the answer began with", now_s)
            return
        attempt.stage, attempt.accepted = Stage.ACCEPTED, message
        if first is None:
            self.phase, self.accepted, self._speaker = Phase.STREAMING, message, attempt
            self._effects.append(st.Begin(attempt.number, message))

    def _refused(self, attempt: Attempt, message: Refused, now_s: float) -> None:
        if attempt.stage is not Stage.SUBMITTED:
            self._fault(attempt, "`refused` after `accepted`", now_s)
        else:
            self._lose(attempt, message.error(), "refused", now_s)

    def _tokens(self, attempt: Attempt, message: Tokens, now_s: float) -> None:
        if self.phase is Phase.ENDING:
            return
        if attempt.stage is not Stage.ACCEPTED:
            self._fault(attempt, "tokens before `accepted`", now_s)
            return
        ids, answer = message.ids, self.answer
        received, coming = len(answer.ids), len(ids)
        if message.first_index != received:
            self._fault(attempt, f"token {message.first_index} came where {received} was next", now_s)
            return
        if received + coming > self._order.max_output_tokens:
            self._fault(attempt, f"more than {self._order.max_output_tokens} output tokens", now_s)
            return
        if coming:
            if not attempt.tokens or attempt.is_suspect or len(self._attempts.live) > 1:
                self._commit(attempt, now_s)
            attempt.tokens += coming
        answer.take(ids, message.text, now_s)
        if answer.stop:
            self._figures_due_s = now_s + FIGURES_WAIT_S
            self._end_text(FinishReason.STOP, now_s)

    def _done(self, attempt: Attempt, message: Done, now_s: float) -> None:
        if attempt.stage is not Stage.ACCEPTED:
            self._fault(attempt, "`done` before `accepted`", now_s)
        elif self.phase is Phase.STREAMING and message.output_tokens != attempt.tokens:
            self._fault(attempt, f"`done` counts {message.output_tokens} tokens of {attempt.tokens}", now_s)
        else:
            self._figures = message
            if self.phase is Phase.STREAMING:
                self._commit(attempt, now_s)
                self._end_text(message.finish_reason, now_s)

    def _failed(self, attempt: Attempt, message: Failed, now_s: float) -> None:
        if self.phase is Phase.ENDING:
            self._figures = message
            return
        self._cu_seconds += message.cu_seconds
        self._lose(attempt, revive(message.code, message.message), "failed", now_s)

    def _progress(self, attempt: Attempt, message: Progress, now_s: float) -> None:
        """The stream is alive; nothing to say."""

    # --- attempts ---------------------------------------------------------------------------------

    @property
    def _rest_tokens(self) -> int:
        return self._order.max_output_tokens - len(self.answer.ids)

    @property
    def _is_bound(self) -> bool:
        return bool(self.answer.ids and self._order.bound_by)

    def _others(self, attempt: Attempt) -> list[Attempt]:
        return [each for each in self._attempts.live if each is not attempt]

    def _open(self, *, takes_over: bool = False) -> None:
        excluded, is_hedge = self._attempts.excluded, bool(self._attempts.live) and not takes_over
        attempt = self._attempts.open(takes_over=takes_over)
        goes_on_exactly = self._order.is_greedy and len(self._fingerprints) == 1
        self._effects.append(
            st.Place(
                attempt.number,
                excluded,
                len(self.answer.ids),
                self._rest_tokens,
                next(iter(self._fingerprints)) if goes_on_exactly else "",
                is_hedge,
            )
        )

    def _can_open_beside(self, attempt: Attempt) -> bool:
        return (
            self.phase in (Phase.OPENING, Phase.STREAMING)
            and attempt.stage is not Stage.PLACING
            and len(self._attempts.live) == 1
            and self._attempts.may_open
            and self._rest_tokens > 0
            and not self._is_bound
        )

    def _leave(self, attempt: Attempt, now_s: float) -> None:
        """Open an attempt that takes over from one whose unit drains, unless that is about to end."""
        if not attempt.is_leaving or self._rest_tokens <= SHORT_REST_TOKENS:
            return
        if self._can_open_beside(attempt):
            self._open(takes_over=True)
        elif self.phase is not Phase.ENDING and not self._is_bound:
            self._move_due_s = now_s + MOVE_AGAIN_S

    def _commit(self, attempt: Attempt, now_s: float) -> None:
        """This attempt has the next token, so the answer is its own: the other one is given up."""
        for other in self._others(attempt):
            if not other.takes_over or self._order.bound_by:
                if other.is_suspect:
                    self._attempts.lost(other)
                self._give_up(other, "failed" if other.is_suspect else "cancelled", now_s)
        attempt.is_suspect = False
        self._attempts.progressed()
        self._broken_s = math.nan
        if attempt is not self._speaker:
            self._speaker = attempt
            self.moves += 1
            gap_s = now_s - self.answer.newest_s if self.answer.ids else 0.0
            self._effects.append(st.Moved(attempt.number, gap_s))
        if not attempt.tokens:
            attempt.first_token_s = now_s
            self._parts += 1
            assert attempt.accepted is not None
            self._fingerprints.add(attempt.accepted.fingerprint)

    def _give_up(self, attempt: Attempt, outcome: str, now_s: float, *, is_charged: bool = False) -> None:
        self._attempts.end(attempt)
        self._effects.append(st.GiveUp(attempt.number, is_charged and attempt.accepted is not None))
        self._settle(attempt, outcome, now_s)

    def _lose(self, attempt: Attempt, error: GridError, outcome: str, now_s: float) -> None:
        """An attempt has ended early: go on with the other one or with a new one, or end with `error`."""
        self._attempts.lost(attempt)
        self._give_up(attempt, _blamed(error, outcome), now_s)
        self._loss = error
        if self.phase is Phase.ENDING or (self._attempts.live and self._rest_tokens):
            return  # `_close` does without figures; or the other goes on, if there is something to go on with
        if self.phase is Phase.STREAMING:
            self._go_on(error, now_s)
        elif isinstance(error, TRIED_ELSEWHERE) and self._attempts.may_open:
            self._open()
        else:
            self._fail(error, now_s)

    def _go_on(self, error: GridError, now_s: float) -> None:
        """An answer that has begun is without a unit."""
        if isinstance(error, DeadlineExceeded | Cancelled):
            self._fail(error, now_s)
        elif not self._rest_tokens:
            self._end_text(FinishReason.LENGTH, now_s)
            self._close(now_s)
        elif self._is_bound:
            self._fail(UnitLost(f"{error.message}; {self._order.bound_by}"), now_s)
        elif self._attempts.may_open:
            if math.isnan(self._broken_s):
                self._broken_s = now_s
            self._open()
        else:
            self._wait_for_unit(error, now_s)

    def _wait_for_unit(self, error: GridError, now_s: float) -> None:
        """No unit can go on with the answer now: ask again soon, or end."""
        again_s = now_s + PLACE_AGAIN_S
        if math.isnan(self._broken_s):
            self._broken_s = now_s
        if again_s <= self._broken_s + CONTINUE_WITHIN_S and self._attempts.may_ever_open:
            self._attempts.forgive()
            self._place_due_s = again_s
            return
        loss = self._loss or error
        reason = "" if error is loss else f"; no other unit can go on: {error.message}"
        self._fail(revive(loss.code, f"{loss.message}{reason}"), now_s)

    def _fault(self, attempt: Attempt, what: str, now_s: float) -> None:
        self._lose(attempt, InternalError(f"a unit broke the stream protocol: {what}"), "failed", now_s)

    # --- ends -----------------------------------------------------------------------------------

    def _end_text(self, reason: str, now_s: float) -> None:
        self.phase = Phase.ENDING
        self._place_due_s = self._move_due_s = math.inf
        for attempt in list(self._attempts.live):
            if attempt is not self._speaker:
                self._give_up(attempt, "cancelled", now_s)
        self._finish_reason = reason
        self._effects += self.answer.finish(now_s)

    def _close(self, now_s: float) -> None:
        """All text is known: settle once the figures are there or late, finish once the tail has left."""
        if self._attempts.live:
            (attempt,) = self._attempts.live
            if self._figures is None and now_s < self._figures_due_s:
                if not self._cancel_sent:
                    self._cancel_sent = True
                    self._effects.append(st.CancelUnit(attempt.number))
                return
            self._attempts.end(attempt)
            self._settle(attempt, "done", now_s)
        self._figures_due_s = math.inf
        if self.answer.due_s is None:
            self.phase = Phase.ENDED
            first_s = self.answer.first_token_s
            figures = self._figures if isinstance(self._figures, Done) else None
            self._effects.append(
                st.Finish(
                    finish_reason=self._finish_reason,
                    usage=self.usage,
                    first_token_s=now_s if math.isnan(first_s) else first_s,
                    figures=figures,
                    stop=self.answer.stop,
                    moves=self.moves,
                    exact=self.exact,
                )
            )

    def _fail(self, error: GridError, now_s: float) -> None:
        """End with `error`, after everything that was received: no token is lost."""
        self._effects += self.answer.flush(now_s)
        for attempt in list(self._attempts.live):
            self._give_up(attempt, _blamed(error, "failed"), now_s)
        self.phase = Phase.ENDED
        self._effects.append(st.Fail(error, self.usage))

    def _settle(self, attempt: Attempt, outcome: str, now_s: float) -> None:
        if not attempt.reservation_id:
            return
        ttft_s = attempt.first_token_s - attempt.placed_s if attempt.tokens else 0.0
        self._effects.append(
            st.Settle(
                attempt.reservation_id,
                outcome,
                attempt.accepted.prompt_tokens if attempt.accepted is not None else 0,
                attempt.tokens,
                ttft_s * 1000,
                (now_s - attempt.placed_s) * 1000,
                self.usage.cached_tokens if outcome == "done" else 0,
            )
        )

    _HANDLERS: ClassVar[dict[type, Callable[[Session, Any, float], None]]] = {
        st.Start: _on_start,
        st.Placed: _on_placed,
        st.NotPlaced: _on_not_placed,
        st.Frames: _on_frames,
        st.LinkLost: _on_link_lost,
        st.Suspected: _on_suspected,
        st.Leaving: _on_leaving,
        st.Charged: _on_charged,
        st.ClientGone: _on_client_gone,
        st.Tick: _on_tick,
    }
    _FRAMES: ClassVar[dict[type, Callable[[Session, Attempt, Any, float], None]]] = {
        Tokens: _tokens,
        Accepted: _accept,
        Refused: _refused,
        Progress: _progress,
        Done: _done,
        Failed: _failed,
    }


def _blamed(error: GridError, outcome: str) -> str:
    """Return the outcome that counts for the unit's health: a broken unit may refuse, too."""
    if isinstance(error, CALLERS_DOING):
        return "cancelled"
    return "failed" if isinstance(error, InternalError) else outcome
