"""The vocabulary that every package shares: what a unit is, what a request asks, what a decision says.

Records that travel on the link are NamedTuples, so that a record is its own wire array; fields are
only ever appended, each with a default. Nothing here computes a policy, reads a clock or does I/O.
"""

from __future__ import annotations

import enum
import secrets
from typing import NamedTuple

UNKNOWN = -1.0
"""A reading that the hardware or engine can't give. Never written as zero."""


class Precision(enum.IntEnum):
    """Weight precision, ordered: a contract's `quantization` is the lowest that it accepts."""

    INT4 = 4
    INT8 = 8
    FP8 = 9
    FP16 = 16
    BF16 = 17
    FP32 = 32

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Return the precision named `text` (`int4` … `fp32`); raises ValueError that lists the names."""
        try:
            return cls[text.upper()]
        except KeyError:
            names = ", ".join(p.label for p in cls)
            raise ValueError(f"unknown precision {text!r}; one of {names}") from None


class UnitState(enum.IntEnum):
    STARTING = 0
    READY = 1
    DRAINING = 2
    FAILED = 3
    """The engine died under a living actor; the supervisor replaces the unit."""
    STANDBY = 4
    """Loaded, and kept for when it is needed: it gets no work until placement takes it in."""
    ASLEEP = 5
    """On standby with its GPU memory given back: the first request wakes the engine."""


class Task(enum.IntEnum):
    """What kind of work a unit's engine does."""

    GENERATE = 0
    EMBED = 1


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """End-of-sequence token or a stop string."""
    LENGTH = "length"
    """`max_output_tokens` or the model's context was reached."""
    CANCELLED = "cancelled"
    ERROR = "error"


class UnitCard(NamedTuple):
    """What does not change while a unit lives; sent once, when it registers."""

    unit_id: str
    incarnation: str
    """New at every start of the process, so that a restarted unit is never taken for the old one."""
    host: str
    port: int
    node_id: str
    region: str
    task: int
    """A `Task`."""
    model: str
    precision: int
    """A `Precision`."""
    fingerprint: str
    """Variant fingerprint: same model, precision and kernels give the same greedy text."""
    context_tokens: int
    gpu_type: str
    """Catalogue name, such as `H100` or `CPU`."""
    gpus: float
    """A share of one GPU, or a whole number of GPUs of one node; 0 for CPU cores."""
    memory_grant_mb: int
    """The unit's own share of the GPU (or the sum over its GPUs; of RAM for CPU units)."""
    max_running: int
    max_waiting: int
    cu_factor: float
    """Catalogue factor of what the unit owns; 1.0 is one A100-80."""
    simulated: bool = False
    dimension: int = 0
    """Vector length of an embedding unit; 0 for others."""
    prefill_tokens_per_s: float = UNKNOWN
    """Prior: prefill speed of a lone request."""
    decode_ms_per_token: float = UNKNOWN
    """Prior: time of one decode step of a lone request."""
    gpu_uuids: tuple[str, ...] = ()
    """NVML's names of the GPUs that it runs on; empty on CPU cores and where no driver tells."""


class UnitLoad(NamedTuple):
    """What changes: one sample of a unit, pushed at 10 Hz."""

    unit_id: str
    incarnation: str
    state: int
    """A `UnitState`."""
    running: int
    waiting: int
    kv_tokens_free: int
    kv_tokens_total: int
    prefill_tokens_queued: int
    """Prompt tokens admitted but not computed yet."""
    steps: int
    """Engine step counter: while it advances the unit is slow, not stuck."""
    reservations: tuple[str, ...] = ()
    """Reservations that this sample's load already includes."""
    prefill_tokens_per_s: float = UNKNOWN
    decode_ms_per_token: float = UNKNOWN
    memory_used_mb: float = UNKNOWN
    compute_utilisation: float = UNKNOWN
    """Share of time with a kernel running, 0 to 1."""
    prompt_tokens: int = 0
    """Looked up in the prefix cache since the unit started."""
    cached_tokens: int = 0
    """Of them, found there."""
    sequence: int = 0
    """How many samples the unit had sent, this one among them: they travel two ways, and an older one may
    come later. 0 from whoever does not count."""
    held_since: int = 0
    """The sequence of the first of its samples that had these reservations."""
    admits: int = 0
    """Requests that it works on at once now, under memory pressure fewer than its card says; 0: as that."""
    chunk_tokens: int = 0
    """Of prompts that one engine step computes now; 0 where the engine has no such limit."""
    preemptions: int = 0
    """Requests that the engine evicted for want of KV memory, since the unit started."""


class GpuCard(NamedTuple):
    """One GPU of a node: what does not change while its driver is loaded."""

    uuid: str
    number: int
    """NVML's index, by PCI address: CUDA's own with `CUDA_DEVICE_ORDER=PCI_BUS_ID`."""
    product: str
    """NVML's name, such as `NVIDIA H100 80GB HBM3`."""
    memory_mb: float
    nvlinks: tuple[int, ...] = ()
    """Active NVLinks to each GPU of the node, in its card's order; those to a switch reach all that have any.
    Empty where the GPU has no NVLink."""
    ancestors: tuple[int, ...] = ()
    """The nearest that PCIe has in common with each GPU of the node, in its card's order, as NVML's level: 0
    (itself), 10 (one switch), 20 (several), 30 (one host bridge), 40 (one socket), 50; or `UNKNOWN`."""
    compute_capability: tuple[int, int] = (0, 0)
    """CUDA's, such as (8, 9); (0, 0) where the driver can't tell."""


class NodeCard(NamedTuple):
    """A node with its GPUs, as its probe found them; sent when the probe registers or opens anew."""

    node_id: str
    incarnation: str
    """New with every start of the probe and every reload of the driver."""
    driver: str
    gpus: tuple[GpuCard, ...]
    flaw: str = ""
    """Why nothing can be read here; "" when it can."""


class GpuSample(NamedTuple):
    """What changes: one reading of a GPU, pushed at 10 Hz. All but `fault` may be `UNKNOWN`."""

    uuid: str
    memory_used_mb: float = UNKNOWN
    memory_free_mb: float = UNKNOWN
    memory_foreign_mb: float = UNKNOWN
    """Of the used: by processes that are not the cell's."""
    compute_utilisation: float = UNKNOWN
    """Share of time with a kernel running, 0 to 1."""
    sm_utilisation: float = UNKNOWN
    """Share of the streaming multiprocessors that were busy, 0 to 1; Hopper and later."""
    bandwidth_utilisation: float = UNKNOWN
    """Share of the memory's peak bandwidth, 0 to 1; Hopper and later."""
    memory_busy: float = UNKNOWN
    """Share of time in which memory was read or written at all, 0 to 1."""
    pcie_sent_mb_per_s: float = UNKNOWN
    pcie_received_mb_per_s: float = UNKNOWN
    nvlink_sent_mb_per_s: float = UNKNOWN
    nvlink_received_mb_per_s: float = UNKNOWN
    sm_clock_mhz: float = UNKNOWN
    memory_clock_mhz: float = UNKNOWN
    throttle: int = int(UNKNOWN)
    """NVML's bits of what lowers the clocks; `grid.hardware.telemetry.throttle_reasons` names them."""
    temperature_c: float = UNKNOWN
    power_w: float = UNKNOWN
    ecc_corrected: int = int(UNKNOWN)
    """Since the driver was loaded."""
    ecc_uncorrected: int = int(UNKNOWN)
    xid: int = int(UNKNOWN)
    """The newest Xid error, 0 when none was seen since the probe began."""
    fault: str = ""
    """Why no work may run on it: what happened and what an operator can do; "" while it is sound."""


class PlacementRequest(NamedTuple):
    """One step that wants a unit. Hard filters first, then hints."""

    request_id: str
    step_id: str
    attempt: int
    tenant_id: str
    task: int
    """A `Task`."""
    model: str
    """Model name or alias; the placement actor resolves aliases."""
    prompt_tokens: int
    """Estimate (the gateway has no tokenizer); for embeddings, of all texts together."""
    max_output_tokens: int
    allowed_regions: tuple[str, ...] = ()
    """Residency: empty means anywhere. Never relaxed."""
    prefer_regions: tuple[str, ...] = ()
    """Strict priority order; a hint, never a residency rule."""
    avoid_models: tuple[str, ...] = ()
    min_memory_mb: int = 0
    lowest_precision: int = 0
    """Lowest acceptable `Precision`; 0 accepts any."""
    exclude_units: tuple[str, ...] = ()
    deadline_ms: float = 0.0
    """Time left for the whole request; 0 means none given."""
    dry_run: bool = False
    """Decide; reserve nothing."""
    explain: bool = False
    """List every candidate and every rejection, also in a refusal: `placement.decide.MAX_LISTED` of each."""
    traceparent: str = ""
    """W3C trace context; empty where the request is not traced."""
    pipeline_id: str = ""
    """Whose answers tell how long this one will be; "" for a call without a stored pipeline."""
    prefix: tuple[int, ...] = ()
    """Chained hashes of the beginnings of the prompt, salted by its tenant: `placement.prefixes`."""
    priority: int = 0
    """Among its tenant's waiting requests the lowest goes first. Negative: a stream that had begun on a unit
    that was lost, which goes before everyone's."""
    prefer_fingerprint: str = ""
    """The variant that a greedy answer began on: on its units the text goes on as it would have there, so
    they come before all others, of whatever region. A preference: any unit of the model can go on with it."""
    origin_region: str = ""
    """Where its gateway stands; "" for the cell's own region."""

    @property
    def reservation_id(self) -> str:
        return f"{self.request_id}/{self.step_id}/{self.attempt}"


class Candidate(NamedTuple):
    """A unit that passed the filters, with its cost in predicted milliseconds."""

    unit_id: str
    incarnation: str
    host: str
    port: int
    region: str
    model: str
    precision: int
    gpu_type: str
    simulated: bool
    network_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    pressure_ms: float
    cu_factor: float = 0.0
    cu_seconds: float = 0.0
    """Predicted: the request's share of the unit's step time, weighted by `cu_factor`."""
    cached_tokens: int = 0
    """Predicted: of the prompt, what the unit's prefix cache holds; `prefill_ms` is without it."""
    others_ms: float = 0.0
    """What choosing it costs beside the request's own time: delay of others there, and targets at risk."""

    @property
    def ttft_ms(self) -> float:
        return self.network_ms + self.queue_ms + self.prefill_ms

    @property
    def total_ms(self) -> float:
        return self.ttft_ms + self.decode_ms + self.pressure_ms


class Rejection(NamedTuple):
    unit_id: str
    code: str
    """One of `placement.filters.REASONS`, such as `model`, `region`, `memory`, `saturated`."""
    detail: str
    """What would have to change, with the numbers."""


class Decision(NamedTuple):
    """What the placement actor decided and why; the same object serves traffic, dry-run and audit."""

    reservation_id: str
    chosen: Candidate
    next_best: tuple[Candidate, ...]
    rejected_by_code: tuple[tuple[str, int], ...]
    rejections: tuple[Rejection, ...]
    """The rejected units where the request asks to explain; else empty."""
    model: str
    """The model that the requested name resolved to."""
    lease_ms: float
    fleet_version: int
    decide_us: float
    stale_view: bool = False
    """Most units went stale together: the observer is at fault, and reservations were trusted."""
    candidates: int = 0
    """How many units passed the filters; `chosen` and `next_best` list the best of them."""
    expected_output_tokens: int = 0
    """The predicted mean, on which `decode_ms` of every candidate rests."""
    output_tokens_p90: int = 0
    """Predicted: nine of ten such answers are no longer."""
    queued_ms: float = 0.0
    """How long the request waited in placement's queue."""


class Message(NamedTuple):
    """One chat turn."""

    role: str
    """`system`, `user` or `assistant`."""
    text: str


class Sampling(NamedTuple):
    max_output_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


class Usage(NamedTuple):
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cu_seconds: float = 0.0

    def __add__(self, other: object) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.cu_seconds + other.cu_seconds,
        )


class FleetUnit(NamedTuple):
    """One row of the placement actor's view as gateways see it."""

    card: UnitCard
    load: UnitLoad
    reserved: int
    """Reservations on the unit, seen by it or not."""
    sample_age_ms: float
    isolated: str = ""
    """Why it gets no work though it is ready: it failed too often; "" for a unit that is trusted."""


class Condemned(NamedTuple):
    """A unit that placement does not trust again; the supervisor replaces it."""

    unit_id: str
    incarnation: str
    reason: str
    is_isolated: bool
    """False for one that still serves, because too much of its model would be away without it."""


class Demand(NamedTuple):
    """How busy a model's units are now."""

    model: str
    requests: int
    """On its units or waiting for one."""
    refused: int
    """Since placement started, for want of a unit with room."""


class Outlook(NamedTuple):
    """What placement sees of the cell that the supervisor acts on."""

    condemned: tuple[Condemned, ...] = ()
    demand: tuple[Demand, ...] = ()
    states: tuple[tuple[str, int], ...] = ()
    """Id and `UnitState` of the units of models with units on standby; one that was taken in is ready."""


class FleetGpu(NamedTuple):
    """One GPU of the cell as gateways see it, whether units run on it or not."""

    node_id: str
    card: GpuCard
    sample: GpuSample
    sample_age_ms: float
    """`UNKNOWN` before the first sample."""
    units: tuple[str, ...] = ()
    """Ids of the units that run on it."""


class FleetQueue(NamedTuple):
    """Those who wait in placement's queue for one model, as gateways see them."""

    model: str
    waiting: int
    tenants: int
    oldest_ms: float
    """How long the one that came first has waited."""
    wait_ms: float
    """Predicted, for a tenant that has nothing waiting."""


ID_BYTES = 12
"""96 random bits: no collision worth a thought at any volume a cell can serve."""


def new_id(prefix: str) -> str:
    """Return a fresh id such as `req_Zk3…`: URL-safe, unguessable, never reused."""
    return f"{prefix}{secrets.token_urlsafe(ID_BYTES)}"
