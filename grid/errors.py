"""The error tree. Errors cross the link as (code, message, details), never as pickles.

GridError
├── InvalidRequest      the caller's mistake; `param` names the field
│   ├── ContextOverflow     the prompt can't fit; carries the counts
│   └── NotFound            unknown or foreign id; the two answer alike
├── Unauthorised        no key, or a wrong one
├── Forbidden           residency or policy
├── Conflict            the state of a resource forbids it
│   └── IdempotencyReused   the same idempotency key came with another body
├── Rejected            work never began
│   ├── NoEligibleUnit      no unit can run it now; says what would have to change
│   └── Saturated           the caller's own requests fill its share of a queue; `retry_after_s` says when
│       │                   to come back
│       └── Overloaded          all requests together do, or nothing had room in time
├── Interrupted         after work began
│   ├── UnitLost
│   ├── DeadlineExceeded
│   └── Cancelled           the client left
└── InternalError       a bug or a broken part of the cell
"""

from __future__ import annotations

from typing import Any, ClassVar


class GridError(Exception):
    """Base of all errors that a part of the grid raises on purpose.

    `code` is stable and machine-readable; `transient` says of a kind what `retryable` says of one error.
    """

    code: ClassVar[str] = "internal_error"
    transient: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str = "", retry_after_s: float = 0.0, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details
        """Counts and reasons for the error envelope: JSON scalars, lists and maps only, never a secret."""

    @property
    def retryable(self) -> bool:
        """Whether the same call can work later."""
        return self.transient


class InvalidRequest(GridError):
    code = "invalid_request"


class ContextOverflow(InvalidRequest):
    code = "context_overflow"


class NotFound(InvalidRequest):
    code = "not_found"


class TooLarge(InvalidRequest):
    code = "request_too_large"


class Unauthorised(GridError):
    code = "unauthorised"


class Forbidden(GridError):
    code = "forbidden"


class Conflict(GridError):
    code = "conflict"


class IdempotencyReused(Conflict):
    code = "idempotency_key_reused"


class Rejected(GridError):
    code = "rejected"
    transient = True


NO_SUCH_UNIT = frozenset({"task", "model"})
"""Why units are rejected where none runs the model."""


class NoEligibleUnit(Rejected):
    code = "no_eligible_unit"

    @property
    def retryable(self) -> bool:
        """Not where units run the model and waiting lets none of them (`ever`); one without units may get
        some."""
        rejected = self.details.get("rejected_by_code", {})
        return bool(self.details.get("ever", True)) or NO_SUCH_UNIT.issuperset(rejected)


class Saturated(Rejected):
    code = "saturated"


class Overloaded(Saturated):
    code = "overloaded"


class Interrupted(GridError):
    code = "interrupted"


class UnitLost(Interrupted):
    code = "unit_lost"
    transient = True


class DeadlineExceeded(Interrupted):
    code = "deadline_exceeded"
    transient = True


class Cancelled(Interrupted):
    code = "cancelled"


class InternalError(GridError):
    code = "internal_error"


ERRORS: dict[str, type[GridError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        ContextOverflow,
        NotFound,
        TooLarge,
        Unauthorised,
        Forbidden,
        Conflict,
        IdempotencyReused,
        Rejected,
        NoEligibleUnit,
        Saturated,
        Overloaded,
        Interrupted,
        UnitLost,
        DeadlineExceeded,
        Cancelled,
        InternalError,
    )
}


def revive(
    code: str,
    message: str,
    *,
    param: str = "",
    retry_after_s: float = 0.0,
    details: dict[str, Any] | None = None,
) -> GridError:
    """Return the error that `code` names; an unknown code (a newer peer's) becomes InternalError."""
    error = ERRORS.get(code, InternalError)(message, param=param, retry_after_s=retry_after_s)
    error.details.update(details or {})
    return error
