"""What `grid.yaml` says of a model: its checkpoints, and the units that run it. Part of `config.Config`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from grid.errors import InvalidRequest
from grid.hardware import catalogue
from grid.words import Precision


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Simulated(Section):
    """How a simulated unit behaves; times come from the hardware catalogue for its GPU and parameters."""

    seed: int = 0
    speed: float = Field(1.0, gt=0)
    """2.0 halves every simulated time; `full_speed` waits for nothing at all."""
    full_speed: bool = False
    answer_tokens: int = Field(0, ge=0, le=65_536)
    """Mean length at which an answer ends by itself; 0: every answer runs to its max_output_tokens."""
    fail_every: int = Field(0, ge=0)
    """Every so-many-th request of a unit breaks halfway, to try isolation out; 0: none."""


SIMULATED_GPU = "H100"
SIMULATED_PARAMETERS_B = 8.0
"""What simulated units pretend to be and to run unless they are told."""


def _known_gpu(name: str) -> str:
    try:
        return catalogue.find(name).name if name else ""
    except InvalidRequest as unknown:
        raise ValueError(unknown.message) from None


def _known_precision(name: str) -> str:
    return Precision.parse(name).label


def _share_or_whole(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"gpus is a share below 1 or a whole number, not {gpus}")
    return gpus


def _check_bounds(min_units: int, max_units: int) -> None:
    if max_units < min_units:
        raise ValueError(f"max_units ({max_units}) is below min_units ({min_units})")


Gpu = Annotated[str, AfterValidator(_known_gpu)]
Gpus = Annotated[float, Field(ge=0), AfterValidator(_share_or_whole)]
PrecisionName = Annotated[str, AfterValidator(_known_precision)]


class Variant(Section):
    """One checkpoint of a model. fp8, and other 16- and 32-bit precisions, can be made of a 16-bit one."""

    precision: PrecisionName
    source: str = ""
    """As the model's own `source`, which is what is meant when this is empty."""


class Standby(Section):
    """Units beyond those that the demand needs, ready to be taken in; within `max_units`."""

    warm: int = Field(0, ge=0, le=1000)
    """Loaded: taking one in costs one decision."""
    asleep: int = Field(0, ge=0, le=1000)
    """Loaded, with the GPU's memory given back: waking one takes a second or a few."""

    @property
    def units(self) -> int:
        return self.warm + self.asleep


class Pool(Section):
    """Units of a model that are alike. What a pool leaves out is as the model says."""

    name: str = Field("", pattern=r"^[a-z0-9.-]{0,40}$")
    """In the ids of its units; empty: its GPU, region and precision, as far as they are given."""
    region: str | None = None
    gpu: Gpu | None = None
    gpus: Gpus | None = None
    cpus: float | None = Field(None, ge=0)
    memory_grant_mb: int | None = Field(None, ge=0)
    kv_cache_mb: int | None = Field(None, ge=16)
    max_running: int | None = Field(None, ge=1, le=4096)
    max_waiting: int | None = Field(None, ge=0, le=65_536)
    precision: PrecisionName | None = None
    """Exactly this variant; None: the best that the GPU serves."""
    min_units: int = Field(1, ge=0, le=10_000)
    max_units: int | None = Field(None, ge=0, le=10_000)
    """None: as many as `min_units`."""
    standby: Standby | None = None
    simulated: Simulated | None = None
    """What its simulated units do otherwise than the model's others."""

    @model_validator(mode="after")
    def _consistent(self) -> Pool:
        _check_bounds(self.min_units, self.min_units if self.max_units is None else self.max_units)
        return self

    @property
    def label(self) -> str:
        """Its name, or what tells it from its model's other pools."""
        parts = [part for part in (self.gpu, self.region, self.precision) if part]
        return self.name or re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower()).strip("-")


class Model(Section):
    """A model and the units that run it: one pool, or those in `pools`."""

    name: str = Field(min_length=1, max_length=128)
    engine: Literal["vllm", "simulated", "embedding"]
    source: str = ""
    """`package:NAME` for a model that an installed package carries, or a folder; empty if simulated."""
    precision: PrecisionName = "fp32"
    """Of the one checkpoint, where there are no `variants`."""
    variants: tuple[Variant, ...] = ()
    """Checkpoints to choose from: each unit runs the best that its GPU serves."""
    parameters_b: float = Field(0.0, ge=0)
    """Billions of parameters, to tell what fits where; 0: not known (simulated: SIMULATED_PARAMETERS_B)."""
    min_units: int = Field(1, ge=0, le=10_000)
    max_units: int = Field(1, ge=0, le=10_000)
    """As many as recent demand needs are kept, within these bounds."""
    standby: Standby = Standby()
    region: str = ""
    """Where its units run; empty is the cell's region."""
    gpu: Gpu = ""
    """The GPU model that its units need, or pretend to have (simulated: SIMULATED_GPU); empty: any."""
    gpus: Gpus = 0.0
    """A share of one GPU (below 1) or a whole number; 0 runs on CPU cores."""
    cpus: float = Field(0.0, ge=0)
    memory_grant_mb: int = Field(0, ge=0)
    """The unit's share of GPU memory (RAM on CPU units); 0 takes it from the hardware."""
    kv_cache_mb: int = Field(512, ge=16)
    """Of the whole unit. Left out, GPU units give the cache what weights and activations leave free."""
    kv_cache_precision: Literal["auto", "model", "fp8"] = "auto"
    """`auto` takes fp8 where the GPU reads it and a 16-bit cache would hold few whole contexts."""
    context_tokens: int = Field(2048, ge=128)
    max_running: int = Field(16, ge=1, le=4096)
    max_waiting: int = Field(32, ge=0, le=65_536)
    adaptive: bool = True
    """vLLM computes shorter pieces of prompts and takes fewer requests while its KV cache is short."""
    pools: tuple[Pool, ...] = ()
    simulated: Simulated = Simulated()

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        _check_bounds(self.min_units, self.max_units)
        for each in self.pools or (self,):
            most = each.min_units if each.max_units is None else each.max_units
            gpus = self.gpus if each.gpus is None else each.gpus
            self._check_standby(each.standby or self.standby, each.min_units, most, gpus)
        if self.engine != "simulated" and not all(variant.source for variant in self.checkpoints):
            raise ValueError(f"engine {self.engine!r} needs a source")
        return self

    def _check_standby(self, standby: Standby, min_units: int, max_units: int, gpus: float) -> None:
        if standby.units and min_units + standby.units > max_units:
            raise ValueError(
                f"{min_units} min_units and {standby.units} on standby are above max_units ({max_units}); "
                "raise it"
            )
        if standby.asleep and not (self.engine == "simulated" or (self.engine == "vllm" and gpus)):
            raise ValueError(
                "standby.asleep needs vLLM on a GPU, whose memory it gives back; use standby.warm"
            )

    @model_validator(mode="after")
    def _unambiguous(self) -> Model:
        if self.variants and "precision" in self.model_fields_set:
            raise ValueError("precision is of a single checkpoint; give each of the variants its own")
        if self.variants and self.engine == "embedding":
            raise ValueError("an embedding model has one checkpoint: vectors of two are not comparable")
        offered = [variant.precision for variant in self.checkpoints]
        if len(set(offered)) < len(offered):
            raise ValueError("two variants have the same precision; keep one")
        labels = [pool.label for pool in self.pools]
        for index, pool in enumerate(self.pools):
            if not pool.label or labels.count(pool.label) > 1:
                raise ValueError(f"pools[{index}] needs a `name` that tells it from the others")
            if pool.precision and pool.precision not in offered:
                raise ValueError(
                    f"pools[{index}].precision: there is no {pool.precision} variant; it has "
                    + ", ".join(offered)
                )
        return self

    @property
    def checkpoints(self) -> tuple[Variant, ...]:
        """Every checkpoint with its source; at least one, no two of one precision."""
        if not self.variants:
            return (Variant(precision=self.precision, source=self.source),)
        return tuple(
            variant if variant.source else variant.model_copy(update={"source": self.source})
            for variant in self.variants
        )

    @property
    def least_units(self) -> int:
        """Units of all its pools that are kept alive."""
        return sum(pool.min_units for _, pool in self.split())

    def split(self) -> tuple[tuple[str, Model], ...]:
        """Return (label, the model with that pool's values) for each pool; ("", itself) without pools."""
        return tuple((pool.label, self._of(pool)) for pool in self.pools) or (("", self),)

    def at(self, precision: Precision) -> Model:
        """Return the model with its checkpoint of `precision` as the only one."""
        chosen = next(variant for variant in self.checkpoints if variant.precision == precision.label)
        return self._with(variants=(), precision=chosen.precision, source=chosen.source)

    def _of(self, pool: Pool) -> Model:
        given = pool.model_dump(exclude={"name", "precision"}, exclude_none=True)
        given.setdefault("max_units", pool.min_units)
        if pool.simulated is not None:
            given["simulated"] = self.simulated.model_dump() | pool.simulated.model_dump(exclude_unset=True)
        model = self._with(pools=(), **given)
        return model.at(Precision.parse(pool.precision)) if pool.precision else model

    def _with(self, **changes: Any) -> Model:
        """Return a copy that is checked as a whole; what was not set stays unset."""
        values = {name: getattr(self, name) for name in self.model_fields_set} | changes
        return Model(**{name: value for name, value in values.items() if value != ()})
