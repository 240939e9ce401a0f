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
from typing import NamedTuple

from grid.hardware import catalogue
from grid.words import Precision, UnitCard

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

KIND_DOUBT = 0.7
"""Standard deviation of a term's prior, as a logarithm: rooflines are right within a factor of two."""

UNIT_DOUBT = 0.15
"""The same of a unit among its kind: clocks, cooling, neighbours."""

REQUEST_NOISE = 0.25
"""Of one request's time around what its batch explains, because the batch changed while it ran."""

REPORT_NOISE = 0.4
"""Of a unit's own figure, which is an average over batches that are gone."""

MAX_UNREST = 4.0
"""How many times noisier than these a kind's observations are taken to be at most."""
UNREST_STEP = 0.05
"""By how much that changes with one of them: twenty find a noise that is twice the usual one."""
MEDIAN_DEVIATION = 0.6745
"""Of a normal distribution, in standard deviations."""

DRIFT = 0.0015
"""Standard deviation of how far a truth wanders between two observations. Against REQUEST_NOISE it makes half
of what is known come from the last 115 requests, so that a unit that gets hot is found out."""

OUTLIER = 3.0
"""Standard deviations beyond which an observation counts as if it lay there."""

MAX_LOG_FACTOR = 4.0
"""No term is corrected by more than a factor of 55."""

KIND_STEP = 0.02
"""A kind's figures are published anew when one has moved by this; finer is below the noise of its inputs."""

UNIT_STEP = 0.05
"""A unit's own factor has to move by this to be published anew, and one that is smaller is none."""
APART = 0.08
"""By how much, as a logarithm, a unit has to be off its kind to be told apart from it."""
COMMON = 0.005
"""What all units of a kind have in common, as a logarithm, is the kind's from here on."""
SURE = 3.5
"""And by how many standard deviations. Each request is another look, and among many looks at many units three
deviations are nothing rare."""

MAX_KINDS = 1_024
"""Kinds without a unit are kept for its return, up to here; the oldest make room."""


class Speeds(NamedTuple):
    step_ms: float
    """What a step takes whatever its batch; with one `step_ms_per_request` it is a lone request's."""
    step_ms_per_request: float
    step_ms_per_kv_token: float
    first_steps: float
    """Steps that a first token takes beside its prompt."""
    prefill_ms_per_token: float

    def scaled(self, decode: float, prefill: float) -> Speeds:
        step_ms, per_request, per_kv_token, first_steps, per_token = self
        return Speeds(
            *(step_ms * decode, per_request * decode, per_kv_token * decode),
            *(first_steps * prefill, per_token * prefill),
        )


class Ran(NamedTuple):
    """One finished request as seen from outside, and what shared its unit."""

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    """Without the way there and back; 0 where its prompt stood in a queue, which says nothing of a speed."""
    token_ms: float
    """Mean time between tokens; 0 where too few came."""
    batch: float
    kv_tokens: float


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


class _Factor:
    """One factor on a prediction, as a logarithm with its variance (a Kalman filter of one state)."""

    __slots__ = ("log", "published", "variance")

    def __init__(self) -> None:
        self.log = self.published = 0.0
        self.variance = UNIT_DOUBT**2

    def take(self, off: float, noise: float) -> None:
        """`off` is the logarithm of observed over predicted without this factor, `noise` its variance."""
        self.variance += DRIFT**2
        spread = self.variance + noise
        bound = OUTLIER * math.sqrt(spread)
        gain = self.variance / spread
        self.log += gain * min(max(off - self.log, -bound), bound)
        self.variance *= 1 - gain

    def publish(self) -> bool:
        """Return whether the published factor had to follow."""
        before, off = self.published, abs(self.log)
        if before == 0.0:
            if off > max(APART, SURE * math.sqrt(self.variance)):
                self.published = self.log
        elif off < UNIT_STEP:
            self.published = 0.0
        elif abs(self.log - before) > UNIT_STEP:
            self.published = self.log
        return self.published != before


class _TwoTerms:
    """`a * x + b * y` with a factor each on a and b: an extended Kalman filter of their logarithms."""

    __slots__ = ("log_x", "log_y", "of_units", "unrest", "var_x", "var_xy", "var_y")

    def __init__(self) -> None:
        self.of_units = 0.0
        """Sum of the logarithms of the units' own factors."""
        self.unrest = 1.0
        """How much noisier its observations are than was thought."""
        self.log_x = self.log_y = 0.0
        self.var_x = self.var_y = KIND_DOUBT**2
        self.var_xy = 0.0

    @property
    def factors(self) -> tuple[float, float]:
        return math.exp(self.log_x), math.exp(self.log_y)

    def predict(self, x: float, y: float) -> float:
        return math.exp(self.log_x) * x + math.exp(self.log_y) * y

    def take(self, x: float, y: float, off: float, noise: float) -> float:
        """Learn from one observation; return the variance that is left in `predict(x, y)`'s logarithm.

        `off` is the logarithm of observed over predicted, `noise` its variance beyond these terms.
        """
        share_x = math.exp(self.log_x) * x / self.predict(x, y)
        share_y = 1.0 - share_x
        var_x, var_y, var_xy = self.var_x + DRIFT**2, self.var_y + DRIFT**2, self.var_xy
        to_x, to_y = var_x * share_x + var_xy * share_y, var_xy * share_x + var_y * share_y
        doubt = share_x * to_x + share_y * to_y
        spread = doubt + noise
        self._listen(abs(off) > MEDIAN_DEVIATION * math.sqrt(spread))
        bound = OUTLIER * math.sqrt(spread)
        off = min(max(off, -bound), bound) / spread
        self.log_x = min(max(self.log_x + to_x * off, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)
        self.log_y = min(max(self.log_y + to_y * off, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)
        self.var_x = var_x - to_x * to_x / spread
        self.var_y = var_y - to_y * to_y / spread
        self.var_xy = var_xy - to_x * to_y / spread
        return doubt * noise / spread

    def _listen(self, louder: bool) -> None:
        """Follow the noise of what is observed: half of it should be within the median deviation."""
        unrest = self.unrest * ((1 + UNREST_STEP) if louder else 1 / (1 + UNREST_STEP))
        self.unrest = min(max(unrest, 1.0), MAX_UNREST)


class _Kind:
    """What equal units learn together."""

    __slots__ = ("decode", "inputs", "outputs", "prefill", "prior", "published", "units")

    def __init__(self, prior: _Prior) -> None:
        self.prior = prior
        self.decode, self.prefill = _TwoTerms(), _TwoTerms()
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

    __slots__ = ("_decode", "_learner", "_prefill", "kind", "unit_id")

    def __init__(self, unit_id: str, kind: _Kind, learner: LearnedSpeeds) -> None:
        self.unit_id = unit_id
        self.kind, self._learner = kind, learner
        self._decode, self._prefill = _Factor(), _Factor()

    @property
    def speeds(self) -> Speeds:
        """As published."""
        return self.kind.published.scaled(math.exp(self._decode.published), math.exp(self._prefill.published))

    def ran(self, ran: Ran) -> None:
        """Learn from a finished request."""
        kind = self.kind
        if ran.output_tokens > 0:
            kind.mixed(ran)
        load_ms = kind.load_ms(ran.batch, ran.kv_tokens, kind.computed_per_token)
        if ran.token_ms > 0:
            _learn(kind.decode, self._decode, kind.prior.step_ms, load_ms, ran.token_ms, REQUEST_NOISE)
        if ran.ttft_ms > 0:
            step_ms = kind.decode.predict(kind.prior.step_ms, load_ms) * math.exp(self._decode.log)
            prompt_ms = kind.prior.prefill_ms_per_token * ran.prompt_tokens
            _learn(kind.prefill, self._prefill, step_ms, prompt_ms, ran.ttft_ms, REQUEST_NOISE)
        self._learner.learned(self)

    def stepped(self, batch: int, kv_tokens: int, step_ms: float) -> None:
        """Learn from what the unit measured of its steps: no prompt is computed in those."""
        load_ms = self.kind.load_ms(batch, kv_tokens, 1.0)
        _learn(self.kind.decode, self._decode, self.kind.prior.step_ms, load_ms, step_ms, REPORT_NOISE)
        self._learner.learned(self)

    def leave(self) -> None:
        self.kind.units.discard(self)
        self.kind.decode.of_units -= self._decode.log
        self.kind.prefill.of_units -= self._prefill.log

    def give_up(self, decode: float, prefill: float) -> None:
        """Leave to the kind what all of its units have in common."""
        self._decode.log -= decode
        self._prefill.log -= prefill

    def moved(self) -> bool:
        decode, prefill = self._decode.publish(), self._prefill.publish()
        return decode or prefill


def _learn(terms: _TwoTerms, own: _Factor, x: float, y: float, observed_ms: float, noise: float) -> None:
    """Share out what an observation says between a kind and its unit, each allowing for the other's doubt."""
    noise = (noise * terms.unrest) ** 2
    off = math.log(observed_ms / terms.predict(x, y))
    doubt = terms.take(x, y, off - own.log, noise + own.variance)
    before = own.log
    own.take(math.log(observed_ms / terms.predict(x, y)), noise + doubt)
    terms.of_units += own.log - before


class LearnedSpeeds:
    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()
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
        unit = UnitSpeed(card.unit_id, kind, self)
        kind.units.add(unit)
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
