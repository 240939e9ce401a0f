"""What can happen to a unit (events) and what it asks for (effects): the words of `unit.py` and `server.py`.

A stream is named by (peer, stream number) towards gateways and by its job number towards the engine: a job
number is never reused, so that a late answer of the engine can't be taken for another stream's.
"""

from __future__ import annotations

from typing import NamedTuple

from grid.engines.base import Generation, Prepared, Step
from grid.errors import GridError
from grid.units.job import Times
from grid.wire.messages import Embed, Submit, WireMessage
from grid.words import Message, UnitState

# --- events: from peers ---------------------------------------------------------------------


class Submitted(NamedTuple):
    """A gateway asks for a generation. `peer` is the connection's number, unique in the process."""

    peer: int
    submit: Submit


class EmbedAsked(NamedTuple):
    peer: int
    embed: Embed


class CancelAsked(NamedTuple):
    peer: int
    stream: int


class PeerLost(NamedTuple):
    """The connection is gone; nobody is left to read what its streams say."""

    peer: int


# --- events: from the engine ----------------------------------------------------------------


class PromptReady(NamedTuple):
    job: int
    prepared: Prepared


class Stepped(NamedTuple):
    job: int
    step: Step


class Encoded(NamedTuple):
    """The vectors of one embedding request, as they go on the wire."""

    job: int
    dimension: int
    data: bytes
    input_tokens: int


class Broke(NamedTuple):
    """The engine raised while it prepared, generated or encoded. UnitLost means that the engine is dead."""

    job: int
    error: GridError


class Released(NamedTuple):
    """The engine holds nothing of this job any more: finished, failed or closed."""

    job: int


class EngineDied(NamedTuple):
    reason: str


# --- events: from the owner -----------------------------------------------------------------


class SetDraining(NamedTuple):
    draining: bool


class SetState(NamedTuple):
    """The unit serves, is on standby, or is on standby and asleep. One that drains goes on draining."""

    state: UnitState


class Tick(NamedTuple):
    """Time passed: deadlines are looked at, and streams that said nothing for a while."""

    steps: int = 0
    """The engine's step counter."""


Event = (
    Submitted
    | EmbedAsked
    | CancelAsked
    | PeerLost
    | PromptReady
    | Stepped
    | Encoded
    | Broke
    | Released
    | EngineDied
    | SetDraining
    | SetState
    | Tick
)


# --- effects --------------------------------------------------------------------------------


class Prepare(NamedTuple):
    """Tokenise a prompt; answered by PromptReady or Broke."""

    job: int
    messages: tuple[Message, ...]
    documents: tuple[str, ...]
    max_output_tokens: int


class Generate(NamedTuple):
    """Start a generation; answered by Stepped events, perhaps Broke, and one Released."""

    job: int
    generation: Generation


class Encode(NamedTuple):
    """Embed texts; answered by Encoded or Broke, and one Released."""

    job: int
    texts: tuple[str, ...]


class Abort(NamedTuple):
    """Stop what the engine does for this job; answered by Released once its slot is free."""

    job: int


class Send(NamedTuple):
    peer: int
    message: WireMessage


class Drop(NamedTuple):
    """Close a connection whose other side breaks the protocol."""

    peer: int
    code: str
    message: str


class Traced(NamedTuple):
    """A request that carries a trace context has ended."""

    times: Times
    error_code: str


class Died(NamedTuple):
    """The unit can't serve any more; its process should end and be replaced."""

    reason: str


Effect = Prepare | Generate | Encode | Abort | Send | Drop | Traced | Died
