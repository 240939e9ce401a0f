"""Every message of the link, and the integer kind of each.

A message is the msgpack array `[stream, …fields]`, in a frame that names its kind. Fields are only ever
appended, each with a default, so that cells of two releases can talk; a kind is never reused. A message
with stream 0 belongs to the connection. Streams are numbered by the side that dialled. `codec.py` turns
these into bytes and back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from grid.errors import GridError, revive
from grid.words import (
    Decision,
    FleetGpu,
    FleetQueue,
    FleetUnit,
    GpuSample,
    Message,
    NodeCard,
    PlacementRequest,
    Sampling,
    UnitCard,
    UnitLoad,
)

PROTOCOL_VERSION = 1


# --- the connection -------------------------------------------------------------------------


class Hello(NamedTuple):
    """First frame, from the dialling side."""

    stream: int
    version: int
    role: str
    """`gateway`, `unit`, `node`, `placement`, `supervisor`, `store` or `relay`."""
    peer_id: str
    nonce: bytes


class Welcome(NamedTuple):
    """The listener's answer: its identity, its challenge, and its proof over both nonces."""

    stream: int
    version: int
    role: str
    peer_id: str
    nonce: bytes
    proof: bytes


class Prove(NamedTuple):
    """The dialler's proof. Nothing else is accepted before it."""

    stream: int
    proof: bytes


class Ping(NamedTuple):
    stream: int
    tick: int
    """The sender's own clock in microseconds; `Pong` returns it."""


class Pong(NamedTuple):
    stream: int
    tick: int


class Bye(NamedTuple):
    """Orderly close: the reason why this side closes. Open streams end with `code`."""

    stream: int
    code: str
    message: str


# --- placement ------------------------------------------------------------------------------


class Place(NamedTuple):
    stream: int
    request: PlacementRequest


class Decided(NamedTuple):
    stream: int
    decision: Decision


class Settle(NamedTuple):
    """The reservation's end; an unknown reservation is ignored. Stream 0: no answer."""

    stream: int
    reservation_id: str
    outcome: str
    """`done`, `failed`, `refused` or `cancelled`."""
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    cached_tokens: int = 0
    """Of the input tokens, those that the unit's prefix cache held."""
    prefix: tuple[int, ...] = ()
    """Hashes that follow the request's own once its answer is part of the conversation."""


class Announce(NamedTuple):
    """A unit registers, on each new connection to the placement actor."""

    stream: int
    card: UnitCard


class Report(NamedTuple):
    """One batch of samples of a node's units; every unit sends its own."""

    stream: int
    node_id: str
    loads: tuple[UnitLoad, ...]


class HeldReservations(NamedTuple):
    """How one unit's list of reservations has changed."""

    place: int
    """Of the unit in its batch."""
    begun: tuple[str, ...]
    ended: tuple[str, ...] = ()
    since: int = 0
    """The list that these change, as `UnitLoad.held_since` names it; 0: `begun` is the whole list."""


class ReportUnits(NamedTuple):
    """One batch of a node: the newest samples of its units as columns (`grid.samples`)."""

    stream: int
    node_id: str
    units: tuple[str, ...]
    incarnations: tuple[str, ...]
    counts: bytes
    """Little-endian int64, a row for each of `COUNTS`, a column for each unit."""
    readings: bytes
    """Little-endian float64, a row for each of `READINGS`."""
    held: tuple[HeldReservations, ...] = ()
    """Of units whose list is another than the sender last told."""


class Watch(NamedTuple):
    """A gateway asks to be pushed the fleet view: at once, on membership changes, and at 1 Hz."""

    stream: int


class Fleet(NamedTuple):
    stream: int
    version: int
    """Rises when a unit joins, leaves or changes state; not with every sample."""
    units: tuple[FleetUnit, ...]
    gpus: tuple[FleetGpu, ...] = ()
    """Every GPU that a probe reads, also those without units."""
    gathering: bool = False
    """The placement actor has only just started: units may be missing that have not reconnected yet."""
    queues: tuple[FleetQueue, ...] = ()
    """Models that somebody waits for."""


class DrainUnit(NamedTuple):
    """Operator to placement, and placement to the unit: take no new work (or, with `draining` false, take it
    again). Placement answers on the stream with a `Fleet` of that one unit."""

    stream: int
    unit_id: str
    draining: bool = True
    restart: bool = False
    """Once the unit has nothing left to do its process ends, and the supervisor starts it anew."""


class TakeIn(NamedTuple):
    """Placement to a unit that is on standby: it serves from now on."""

    stream: int
    unit_id: str


class AnnounceNode(NamedTuple):
    """A node's probe registers, on each new connection to the placement actor and when its GPUs change."""

    stream: int
    card: NodeCard


class ReportNode(NamedTuple):
    """One batch of samples: all GPUs of one node. It carries no time: whoever receives it has a clock."""

    stream: int
    node_id: str
    incarnation: str
    samples: tuple[GpuSample, ...]


# --- generation -----------------------------------------------------------------------------


class Submit(NamedTuple):
    """One generation attempt. `emitted_*` and `prompt_hash` are empty on a first attempt."""

    stream: int
    request_id: str
    attempt: int
    reservation_id: str
    model: str
    messages: tuple[Message, ...]
    documents: tuple[str, ...]
    """Retrieved texts, best first; the unit packs as many as the context leaves room for."""
    sampling: Sampling
    tenant_salt: str
    """Separates prefix caches: equal prompts of two tenants share nothing."""
    deadline_ms: float
    priority: int = 0
    emitted_ids: tuple[int, ...] = ()
    emitted_code_points: int = 0
    prompt_hash: bytes = b""
    traceparent: str = ""
    """W3C trace context; empty where the request is not traced."""


class Accepted(NamedTuple):
    stream: int
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    """0 unless an engine knows at admission; `Done.cached_tokens` is its figure after the prefill."""
    prompt_hash: bytes
    fingerprint: str
    documents_used: int


class Refused(NamedTuple):
    """Work never began (a place or submit that can't be taken, a call that failed)."""

    stream: int
    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0
    details: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple default is never mutated

    @classmethod
    def of(cls, stream: int, error: GridError) -> Refused:
        return cls(stream, error.code, error.message, error.param, error.retry_after_s, error.details)

    def error(self) -> GridError:
        """Return the error that the other side refused with."""
        return revive(
            self.code,
            self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            details=self.details,
        )


class Tokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Most of the traffic, so not a NamedTuple: three times faster to make, and the garbage collector, which
    would go through every token that waits for a reader, never sees it. The bytes are the same."""

    stream: int
    attempt: int
    first_index: int
    ids: tuple[int, ...]
    text: str
    """What these ids complete; may be empty inside a multi-byte character."""

    def _replace(self, **changes: Any) -> Tokens:
        return msgspec.structs.replace(self, **changes)


class Progress(NamedTuple):
    """The stream is alive but has nothing to say: it waits, or its engine is slow but steps."""

    stream: int
    attempt: int
    state: str
    """`waiting`, `prefill` or `decode`."""
    prefill_tokens_done: int = 0


class Done(NamedTuple):
    stream: int
    attempt: int
    finish_reason: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cu_seconds: float
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class Failed(NamedTuple):
    """The end of an accepted stream that did not finish; what was generated so far is charged."""

    stream: int
    attempt: int
    code: str
    message: str
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cu_seconds: float = 0.0


class Cancel(NamedTuple):
    stream: int
    attempt: int = 0


class Count(NamedTuple):
    """A gateway asks how many tokens a prompt has, as `Submit` would make it. Nothing is admitted, nothing
    runs. Answered by `Counted` or `Refused`."""

    stream: int
    request_id: str
    model: str
    messages: tuple[Message, ...]
    documents: tuple[str, ...] = ()
    """Retrieved texts, best first; as many count as the context leaves room for."""
    max_output_tokens: int = 0
    """Room that is kept for the answer."""
    traceparent: str = ""


class Counted(NamedTuple):
    stream: int
    prompt_tokens: int
    documents_used: int = 0


# --- embeddings -----------------------------------------------------------------------------


class Embed(NamedTuple):
    stream: int
    request_id: str
    reservation_id: str
    model: str
    texts: tuple[str, ...]
    deadline_ms: float
    traceparent: str = ""


class Vectors(NamedTuple):
    stream: int
    dimension: int
    data: bytes
    """Row-major little-endian float32, one unit-length row a text."""
    input_tokens: int
    cu_seconds: float = 0.0


# --- the embedded vector store --------------------------------------------------------------


class StoreCall(NamedTuple):
    """One operation on the cell's vector store; `args` are JSON-like, vectors travel in `data`."""

    stream: int
    op: str
    collection: str
    args: dict[str, Any]
    data: bytes = b""


class StoreReply(NamedTuple):
    stream: int
    result: dict[str, Any]


WireMessage = (
    Hello
    | Welcome
    | Prove
    | Ping
    | Pong
    | Bye
    | Place
    | Decided
    | Settle
    | Announce
    | Report
    | Watch
    | Fleet
    | DrainUnit
    | TakeIn
    | AnnounceNode
    | ReportNode
    | ReportUnits
    | Submit
    | Accepted
    | Refused
    | Tokens
    | Progress
    | Done
    | Failed
    | Cancel
    | Count
    | Counted
    | Embed
    | Vectors
    | StoreCall
    | StoreReply
)

KINDS: dict[int, type[WireMessage]] = {
    1: Hello,
    2: Welcome,
    3: Prove,
    4: Ping,
    5: Pong,
    6: Bye,
    10: Place,
    11: Decided,
    12: Settle,
    13: Announce,
    14: Report,
    15: Watch,
    16: Fleet,
    17: DrainUnit,
    18: AnnounceNode,
    19: ReportNode,
    20: Submit,
    21: Accepted,
    22: Refused,
    23: Tokens,
    24: Progress,
    25: Done,
    26: Failed,
    27: Cancel,
    28: Count,
    29: Counted,
    30: Embed,
    31: Vectors,
    32: ReportUnits,
    33: TakeIn,
    40: StoreCall,
    41: StoreReply,
    # 50 is kept for the digest that peered cells will exchange.
}
