"""The proofs that both sides of a new connection give. Pure: nonces are arguments.

Each side proves that it holds the cell's link secret with an HMAC over everything that both sides said, under
a label of its own, so that a proof can't be replayed on another connection or sent back to its maker.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from grid.wire.messages import PROTOCOL_VERSION, Hello, Prove, Welcome

NONCE_BYTES = 32
"""No nonce ever repeats, and none can be guessed."""

MIN_SECRET_BYTES = 16
"""A shorter secret could be found by trying all of them against one recorded proof."""

OLDEST_VERSION = 1
"""Fields are only ever appended, so every version since this one can talk to ours."""

MAX_NAME_BYTES = 256
"""Roles and peer ids go into logs."""


class HandshakeError(Exception):
    """The other side can't be let in. `code` is `unauthorised` or `protocol_error`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def hello(role: str, peer_id: str, nonce: bytes) -> Hello:
    return Hello(0, PROTOCOL_VERSION, role, peer_id, nonce)


def welcome(secret: bytes, theirs: Hello, role: str, peer_id: str, nonce: bytes) -> Welcome:
    """Return the listener's answer with its proof. Raises HandshakeError for a hello that can't be taken."""
    _check_greeting(theirs)
    mine = Welcome(0, PROTOCOL_VERSION, role, peer_id, nonce, b"")
    return mine._replace(proof=_proof(secret, b"listener", theirs, mine))


def prove(secret: bytes, mine: Hello, theirs: Welcome) -> Prove:
    """Check the listener's proof and return the dialler's. Raises HandshakeError."""
    _check_greeting(theirs)
    if not hmac.compare_digest(theirs.proof, _proof(secret, b"listener", mine, theirs)):
        raise HandshakeError("unauthorised", "the listener does not hold this cell's link secret")
    return Prove(0, _proof(secret, b"dialler", mine, theirs))


def check(secret: bytes, theirs: Hello, mine: Welcome, proof: Prove) -> None:
    """Check the dialler's proof. Raises HandshakeError."""
    if not hmac.compare_digest(proof.proof, _proof(secret, b"dialler", theirs, mine)):
        raise HandshakeError("unauthorised", "the dialler does not hold this cell's link secret")


def _check_greeting(theirs: Hello | Welcome) -> None:
    if theirs.version < OLDEST_VERSION:
        reason = f"protocol version {theirs.version} is older than {OLDEST_VERSION}, the oldest that we speak"
        raise HandshakeError("protocol_error", reason)
    if len(theirs.nonce) != NONCE_BYTES:
        raise HandshakeError("protocol_error", f"the nonce has {len(theirs.nonce)} bytes, not {NONCE_BYTES}")
    if not theirs.role or max(len(theirs.role), len(theirs.peer_id)) > MAX_NAME_BYTES:
        raise HandshakeError("protocol_error", f"role and peer id have 1 to {MAX_NAME_BYTES} characters")


def _proof(secret: bytes, label: bytes, dialler: Hello, listener: Welcome) -> bytes:
    """Covers the fields by name: one that a newer release appends must not change an older one's proof."""
    said = [[side.version, side.role, side.peer_id, side.nonce] for side in (dialler, listener)]
    return hmac.new(secret, msgspec.msgpack.encode([label, *said]), hashlib.sha256).digest()
