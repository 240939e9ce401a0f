"""Answers that outlive their units, in simulated worlds full of faults; and proof that the checkers bite.

`make sim SEEDS=10000` runs more worlds. A world that breaks says which; the same seed breaks it again.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from sim.worlds import unit as sim_unit
from sim.worlds.world import World

from gateway.pipeline import stream as st
from gateway.pipeline.attempts import Attempt
from gateway.pipeline.session import Session
from gateway.pipeline.stops import StopFilter
from grid.errors import GridError
from grid.wire.messages import Tokens

WORLDS = int(os.environ.get("GRID_SIM_SEEDS", "50"))
IN_ONE_TEST = 10
BITES_WITHIN = 40
"""Worlds in which a broken continuation must show."""


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(0, WORLDS, IN_ONE_TEST))
def test_worlds_full_of_faults(first: int) -> None:
    moves = 0
    for seed in range(first, min(first + IN_ONE_TEST, WORLDS)):
        world = World(seed)
        try:
            world.run()
        except BaseException as broken:
            broken.add_note(f"in the world of seed {seed}, at {world.clock.now_s:.6f} s")
            raise
        moves += world.moves
    assert moves, "worlds in which nothing is moved prove nothing"


@pytest.mark.slow
def test_the_same_seed_is_the_same_world() -> None:
    assert World(7).run() == World(7).run() != World(8).run()


# --- the checkers bite ------------------------------------------------------------------------------


class Changed(Session):
    """A session whose effects are changed on their way out."""

    def change(self, effect: st.Effect) -> st.Effect | None:
        raise NotImplementedError

    def handle(self, event: st.Event, now_s: float) -> list[st.Effect]:
        changed = [self.change(effect) for effect in super().handle(event, now_s)]
        return [effect for effect in changed if effect is not None]


class ForgetsTheLastToken(Changed):
    def change(self, effect: st.Effect) -> st.Effect | None:
        if isinstance(effect, st.SubmitTo) and effect.emitted_ids:
            return effect._replace(emitted_ids=effect.emitted_ids[:-1])
        return effect


class KeepsTheLostReservation(Changed):
    def change(self, effect: st.Effect) -> st.Effect | None:
        return None if isinstance(effect, st.Settle) and effect.outcome == "failed" else effect


class ForgetsWhatWasSpent(Changed):
    def change(self, effect: st.Effect) -> st.Effect | None:
        if isinstance(effect, st.SubmitTo):
            return effect._replace(rest_tokens=effect.rest_tokens + len(effect.emitted_ids))
        return effect


class GoesBackToTheLostUnit(Changed):
    def change(self, effect: st.Effect) -> st.Effect | None:
        return effect._replace(excluded=()) if isinstance(effect, st.Place) else effect


class LetsBothSpeak(Session):
    """Takes the tokens of both attempts, wherever they begin."""

    def _both(self, attempt: Attempt, message: Tokens, now_s: float) -> None:
        self._tokens(attempt, message._replace(first_index=len(self.answer.ids)), now_s)

    def _commit(self, attempt: Attempt, now_s: float) -> None:
        live, self._attempts.live = self._attempts.live, [attempt]
        super()._commit(attempt, now_s)
        self._attempts.live = live

    _FRAMES: ClassVar[Any] = {**Session._FRAMES, Tokens: _both}


class FailsAtOnce(Session):
    def _go_on(self, error: GridError, now_s: float) -> None:
        self._fail(error, now_s)


class ForgetsStopStringsAtTheCut(Session):
    def _commit(self, attempt: Attempt, now_s: float) -> None:
        answer = self.answer
        if attempt is not self._speaker and answer._stops is not None:
            held = answer._stops.finish()
            answer._fresh.append(held.text)
            answer._fresh_tokens += held.tokens
            answer._stops = StopFilter(self._order.stops)
        super()._commit(attempt, now_s)


class DecodesFromNothing(Session):
    """Its units do: their decoders are not fed what was emitted."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        ForgetsTheLastToken,
        KeepsTheLostReservation,
        ForgetsWhatWasSpent,
        GoesBackToTheLostUnit,
        LetsBothSpeak,
        FailsAtOnce,
        ForgetsStopStringsAtTheCut,
        DecodesFromNothing,
    ],
)
def test_a_broken_continuation_shows(broken: type[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_unit.SimEngine, "decoder_is_primed", broken is not DecodesFromNothing)
    for seed in range(BITES_WITHIN):
        try:
            World(seed, broken).run()
        except AssertionError:
            return
    raise AssertionError(f"{BITES_WITHIN} worlds did not notice")
