"""What a cell is made of, for those who run it: units, GPUs, keys, health."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.http.shapes.shape import Shape


class UnitView(Shape):
    unit_id: str
    model: str
    task: Literal["generate", "embed"]
    state: Literal["starting", "ready", "isolated", "draining", "drained", "standby", "asleep", "failed"]
    isolated: str | None = Field(description="why it gets no work until canaries succeed or it is replaced")
    simulated: bool
    region: str
    node_id: str
    gpu_type: str
    gpus: float
    gpu_uuids: list[str] = Field(description="which of `gpus` of the list it runs on")
    memory_grant_mb: int
    precision: str
    fingerprint: str
    context_tokens: int
    dimension: int
    cu_factor: float
    running: int
    max_running: int
    waiting: int
    max_waiting: int
    reserved: int
    kv_tokens_free: int
    kv_tokens_total: int
    prefill_tokens_per_s: float | None = Field(description="measured; null before the first request")
    decode_ms_per_token: float | None = Field(description="measured, as the batch is now")
    prompt_tokens: int = Field(description="looked up in the prefix cache since the unit started")
    cached_tokens: int = Field(description="of them, found there")
    admits: int = Field(description="requests in work at once now; fewer while KV memory is short")
    chunk_tokens: int | None = Field(
        description="prompt tokens that one engine step computes now; null where there is no such limit"
    )
    preemptions: int = Field(description="requests evicted for want of KV memory since the unit started")
    sample_age_ms: float


class GpuView(Shape):
    """One GPU as its node's driver tells; null is what it can't tell."""

    uuid: str
    node_id: str
    index: int
    product: str
    compute_capability: str | None = Field(description="CUDA's, such as 8.9")
    catalogue_name: str | None = Field(description="what the grid knows it as; null: guessed from its driver")
    warning: str | None = Field(description="what is uncertain about it")
    memory_total_mb: float | None
    memory_used_mb: float | None
    memory_free_mb: float | None
    memory_foreign_mb: float | None = Field(description="used by processes that are not the cell's")
    nvlinks: list[int] = Field(description="active links to each GPU of the node; empty without NVLink")
    units: list[str] = Field(description="ids of the units that run on it")
    fault: str | None = Field(description="why no work runs on it, and what to do")
    throttled_by: list[str] | None = Field(description="what lowers its clocks")
    compute_utilisation: float | None = Field(description="share of time with a kernel running")
    sm_utilisation: float | None = Field(description="share of its multiprocessors busy; Hopper and later")
    bandwidth_utilisation: float | None = Field(description="share of peak bandwidth; Hopper and later")
    memory_busy: float | None = Field(description="share of time in which memory was used at all")
    pcie_sent_mb_per_s: float | None
    pcie_received_mb_per_s: float | None
    nvlink_sent_mb_per_s: float | None
    nvlink_received_mb_per_s: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    ecc_corrected: int | None = Field(description="since the driver was loaded")
    ecc_uncorrected: int | None
    xid: int | None = Field(description="the newest Xid error; 0 for none")
    sample_age_ms: float | None


class QueueView(Shape):
    """Requests that wait because every unit of a model is full."""

    model: str
    waiting: int
    tenants: int
    oldest_ms: float = Field(description="how long the one that came first has waited")
    wait_ms: float = Field(description="predicted, for a tenant that has nothing waiting")


class UnitList(Shape):
    fleet_version: int
    units: list[UnitView]
    gpus: list[GpuView]
    queues: list[QueueView] = Field(description="models that somebody waits for")


class KeyView(Shape):
    key_id: str
    tenant_id: str
    operator: bool
    label: str
    created_at: str


class NewKeyView(KeyView):
    key: str = Field(description="shown this once")


class KeyList(Shape):
    keys: list[KeyView]


class Health(Shape):
    status: Literal["ok"]


class Readiness(Shape):
    ready: bool
    reasons: list[str]
