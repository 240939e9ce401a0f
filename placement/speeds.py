"""How fast units are: a roofline prior, corrected by what requests and units report. Pure.

    step(batch, kv)  = step_ms + step_ms_per_request * batch + step_ms_per_kv_token * kv
    first(prompt)    = first_steps * step + prefill_ms_per_token * prompt

A step reads the weights (what a lone request waits for), reads the KV cache of its batch, and computes: one
token for each request, and of the prompts that come in meanwhile so many tokens as go by for each that goes
out. Units of one kind (same model, GPU, share, precision and prior) learn these terms together, as factors on
the prior. A unit by itself differs from its kind by one factor for decode and one for prefill, and only once
that is beyond doubt: equal units cost exactly the same, whatever the noise of their measurements, so none
attracts a herd. What is published changes at `publish` alone, for a whole kind at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple, TypeVar

from grid.hardware import catalogue
from grid.words import Precision, UnitCard
from placement.columns import Floats
from placement.factors import DRIFT, Factor, TwoTerms, learn
from placement.neighbours import Neighbours, Slowed

DEFAULT_PREFILL_TOKENS_PER_S = 1_000.0
DEFAULT_STEP_MS = 30.0
"""For a unit that says nothing of its speed: a small GPU's, so that it is neither flooded nor starved."""

MAX_MS_PER_TOKEN = 60_000.0
"""A minute a token is broken, not slow; the cap keeps every product finite."""

PROMPT_PER_OUTPUT = 2.0
"""Prior of prompt tokens to compute for each token that goes out: from 1 (chat) to 10 (retrieval)."""

REMEMBERED_TOKENS = 100_000.0
"""Output tokens over which that share is averaged: some hundred answers."""

MAX_PROMPT_PER_OUTPUT = 1_000.0
"""Embedding-like work aside, more is an error; the prefix cache keeps real work far below."""

ATTENTION_TOKENS = 90_000
"""Prompts so long take as long for their attention as for all else. Measured kernels: 85,000 to 91,000 for
the shapes of an 8B model on H100; larger models have more, which what is learned of a kind's prefill takes
up."""

REQUEST_NOISE = 0.25
"""Of one request's time around what its batch explains, because the batch changed while it ran."""

REPORT_NOISE = 0.4
"""Of a unit's own figure, which is an average over batches that are gone."""

KIND_STEP = 0.03
"""A kind's figures are published anew when one has moved by this; finer is below the noise of its inputs."""

COMMON = 0.005
"""What all units of a kind have in common, as a logarithm, is the kind's from here on."""

MAX_KINDS = 1_024
"""Kinds without a unit are kept for its return, up to here; the oldest make room."""


Tokens = TypeVar("Tokens", float, Floats)


def prompt_work(prompt_tokens: float, cached_tokens: Tokens) -> Tokens:
    """Return what of a prompt is to compute beyond its cached beginning, as tokens of a short prompt.

    Each token attends to all before it, so the later ones of a long prompt are more work.
    """
    return (prompt_tokens - cached_tokens) * (1.0 + (prompt_tokens + cached_tokens) / ATTENTION_TOKENS)


class Speeds(NamedTuple):
    step_ms: float
    """What a step takes whatever its batch; with one `step_ms_per_request` it is a lone request's."""
    step_ms_per_request: float
    step_ms_per_kv_token: float
    first_steps: float
    """Steps that a first token takes beside its prompt."""
    prefill_ms_per_token: float

    def slowed(self, factor: float) -> Speeds:
        """Return those of a unit whose every step takes `factor` times as long."""
        step_ms, per_request, per_kv_token, first_steps, per_token = self
        return Speeds(
            *(step_ms * factor, per_request * factor, per_kv_token * factor), first_steps, per_token * factor
        )

    def scaled(self, decode: float, prefill: float) -> Speeds:
        step_ms, per_request, per_kv_token, first_steps, per_token = self
        return Speeds(
            *(step_ms * decode, per_request * decode, per_kv_token * decode),
            *(first_steps * prefill, per_token * prefill),
        )


class Ran(NamedTuple):
    """One finished request as seen from outside, and what shared its unit."""

    prompt_tokens: int
    """Those that were computed: without what the prefix cache held."""
    output_tokens: int
    ttft_ms: float
    """Without the way there and back; 0 where its prompt stood in a queue, which says nothing of a speed."""
    token_ms: float
    """Mean time between tokens; 0 where too few came."""
    batch: float
    kv_tokens: float
    cached_tokens: int = 0
    """Of the prompt, beside `prompt_tokens`, which were computed."""


class _Prior(NamedTuple):
    step_ms: float
    kv_ms_per_token: float
    prefill_ms_per_token: float


def _prior(card: UnitCard) -> _Prior:
    rate = card.prefill_tokens_per_s if card.prefill_tokens_per_s > 0 else DEFAULT_PREFILL_TOKENS_PER_S
    step_ms = card.decode_ms_per_token if card.decode_ms_per_token > 0 else DEFAULT_STEP_MS
    step_ms = min(step_ms, MAX_MS_PER_TOKEN)
    kv_ms = catalogue.kv_ms_per_token(card.gpu_type, Precision(card.precision), card.gpus, step_ms)
    return _Prior(step_ms, kv_ms, min(1e3 / rate, MAX_MS_PER_TOKEN))


class _Kind:
    """What equal units learn together."""

    __slots__ = ("decode", "inputs", "outputs", "prefill", "prior", "published", "units")

    def __init__(self, prior: _Prior) -> None:
        self.prior = prior
        self.decode, self.prefill = TwoTerms(), TwoTerms()
        self.outputs = REMEMBERED_TOKENS / 100
        self.inputs = PROMPT_PER_OUTPUT * self.outputs
        self.units: set[UnitSpeed] = set()
        self.published = self.speeds()

    def mixed(self, ran: Ran) -> None:
        kept = max(0.0, 1.0 - ran.output_tokens / REMEMBERED_TOKENS)
        self.outputs = self.outputs * kept + ran.output_tokens
        self.inputs = self.inputs * kept + ran.prompt_tokens

    @property
    def computed_per_token(self) -> float:
        """Tokens computed for each that goes out: itself, and its share of prompts."""
        return 1.0 + min(self.inputs / self.outputs, MAX_PROMPT_PER_OUTPUT)

    def load_ms(self, batch: float, kv_tokens: float, computed: float) -> float:
        others = max(batch - 1.0, 0.0)
        return self.prior.prefill_ms_per_token * computed * others + self.prior.kv_ms_per_token * kv_tokens

    def speeds(self) -> Speeds:
        weights, load = self.decode.factors
        first, prompt = self.prefill.factors
        per_request_ms = load * self.prior.prefill_ms_per_token * self.computed_per_token
        return Speeds(
            step_ms=weights * self.prior.step_ms - per_request_ms,
            step_ms_per_request=per_request_ms,
            step_ms_per_kv_token=load * self.prior.kv_ms_per_token,
            first_steps=first,
            prefill_ms_per_token=prompt * self.prior.prefill_ms_per_token,
        )

    def counted(self) -> None:
        """Say how fast the truth may wander: many units observe as much in a moment as one in an hour."""
        self.decode.drift = self.prefill.drift = DRIFT**2 / max(1, len(self.units))

    def gather(self) -> None:
        """Take from the units' own factors what they have in common: that is the kind's."""
        decode, prefill = (terms.of_units / max(1, len(self.units)) for terms in (self.decode, self.prefill))
        if abs(decode) + abs(prefill) < COMMON:
            return
        for terms, common in ((self.decode, decode), (self.prefill, prefill)):
            terms.log_x += common
            terms.log_y += common
            terms.of_units = 0.0
        for unit in self.units:
            unit.give_up(decode, prefill)

    def moved(self) -> bool:
        """Return whether the published figures had to follow."""
        now, before = self.speeds(), self.published
        lone_ms = before.step_ms + before.step_ms_per_request
        bounds = (lone_ms, lone_ms, *before[2:])
        if all(abs(new - old) <= KIND_STEP * by for new, old, by in zip(now, before, bounds, strict=True)):
            return False
        self.published = now
        return True


class UnitSpeed:
    """One unit's part: its kind, and what sets it apart."""

    __slots__ = ("_decode", "_learner", "_prefill", "card", "kind", "slowed", "unit_id")

    def __init__(self, card: UnitCard, kind: _Kind, learner: LearnedSpeeds, slowed: Slowed) -> None:
        self.card, self.unit_id = card, card.unit_id
        self.kind, self._learner = kind, learner
        self.slowed = slowed
        self._decode, self._prefill = Factor(), Factor()

    @property
    def speeds(self) -> Speeds:
        """As published; the same object for all units of a kind that have no factor of their own."""
        speeds, slowed = self.kind.published, self.slowed.published
        if self._decode.published or self._prefill.published:
            speeds = speeds.scaled(math.exp(self._decode.published), math.exp(self._prefill.published))
        return speeds if slowed == 1.0 else speeds.slowed(slowed)

    def ran(self, ran: Ran) -> None:
        """Learn from a finished request."""
        kind = self.kind
        if ran.output_tokens > 0:
            kind.mixed(ran)
        load_ms = kind.load_ms(ran.batch, ran.kv_tokens, kind.computed_per_token)
        slowed, noise = self.slowed.factor, REQUEST_NOISE * self.slowed.noise
        if ran.token_ms > 0:
            alone_ms = ran.token_ms / slowed
            learn(kind.decode, self._decode, kind.prior.step_ms, load_ms, alone_ms, noise)
        if ran.ttft_ms > 0:
            step_ms = kind.decode.predict(kind.prior.step_ms, load_ms) * math.exp(self._decode.log)
            whole_tokens = ran.prompt_tokens + ran.cached_tokens
            prompt_ms = kind.prior.prefill_ms_per_token * prompt_work(whole_tokens, ran.cached_tokens)
            learn(kind.prefill, self._prefill, step_ms, prompt_ms, ran.ttft_ms / slowed, noise)
        self._learner.learned(self)

    def stepped(self, batch: int, kv_tokens: int, step_ms: float) -> float:
        """Learn from what the unit measured of its steps: no prompt is computed in those. Return the
        logarithm of it over what any unit of the kind would take, so crowded."""
        kind, load_ms = self.kind, self.kind.load_ms(batch, kv_tokens, 1.0)
        off = math.log(step_ms / kind.decode.predict(kind.prior.step_ms, load_ms) / self.slowed.factor)
        alone_ms = kind.decode.predict(kind.prior.step_ms, load_ms) * math.exp(self._decode.log)
        self.slowed.observed(math.log(step_ms / alone_ms))
        step_ms /= self.slowed.factor
        noise = REPORT_NOISE * self.slowed.noise
        learn(kind.decode, self._decode, kind.prior.step_ms, load_ms, step_ms, noise)
        self._learner.learned(self)
        return off

    def leave(self) -> None:
        self._learner.neighbours.leave(self.card)
        self.kind.units.discard(self)
        self.kind.counted()
        self.kind.decode.of_units -= self._decode.log
        self.kind.prefill.of_units -= self._prefill.log

    def give_up(self, decode: float, prefill: float) -> None:
        """Leave to the kind what all of its units have in common."""
        self._decode.log -= decode
        self._prefill.log -= prefill

    def moved(self) -> bool:
        decode, prefill = self._decode.publish(), self._prefill.publish()
        return decode or prefill


class LearnedSpeeds:
    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()
        self.neighbours = Neighbours()
        self._learned: set[UnitSpeed] = set()
        """Since the last `publish`; bounded by the units."""

    def join(self, card: UnitCard) -> UnitSpeed:
        prior = _prior(card)
        key = (card.task, card.model, card.gpu_type, card.gpus, card.precision, card.simulated, prior)
        kind = self._kinds.get(key)
        if kind is None:
            self._make_room()
            kind = self._kinds[key] = _Kind(prior)
        self._kinds.move_to_end(key)
        unit = UnitSpeed(card, kind, self, self.neighbours.join(card))
        kind.units.add(unit)
        kind.counted()
        return unit

    def _make_room(self) -> None:
        if len(self._kinds) >= MAX_KINDS:
            idle = next((key for key, kind in self._kinds.items() if not kind.units), None)
            if idle is not None:
                del self._kinds[idle]

    def learned(self, unit: UnitSpeed) -> None:
        self._learned.add(unit)

    def publish(self) -> list[UnitSpeed]:
        """Return the units whose `speeds` are others now: all of a kind, or single ones beyond doubt."""
        if not self._learned:
            return []
        kinds = {unit.kind for unit in self._learned}
        for kind in kinds:
            kind.gather()
        changed = {unit for unit in self._learned if unit.moved()}
        for kind in kinds:
            if kind.moved():
                changed |= kind.units
        self._learned.clear()
        return [unit for unit in changed if unit in unit.kind.units]
