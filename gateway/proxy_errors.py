"""What HAProxy answers by itself, when no replica can: the grid's own envelope instead of a page. Pure.

A request that HAProxy can't parse, or whose head it waits for in vain, is the exception: it is refused with a
built-in page that no setting reaches.
"""

from __future__ import annotations

import orjson

from gateway.http.errors import GRID, RequestTimeout
from grid.errors import DeadlineExceeded, GridError, InvalidRequest, Rejected

REQUEST_ID = "%[unique-id]"
ID_FORMAT = "req_%[uuid]"
RETRY_AFTER_S = 1
"""A replica that restarts is back within seconds, and another one stands beside it."""
ERRORS: dict[int, GridError] = {
    400: InvalidRequest("the request could not be read to its end; send it again, whole", param="body"),
    408: RequestTimeout("the request did not arrive in time; send it again", param="body"),
    502: Rejected("the gateway replica that took the request went away; try again"),
    503: Rejected("no gateway replica takes requests now; try again in a second"),
    504: DeadlineExceeded("the gateway replica did not answer in time"),
}


def rules() -> str:
    """Return the lines for the `defaults` of HAProxy's configuration."""
    lines = [f"unique-id-format {ID_FORMAT}"]
    for status, error in ERRORS.items():
        body = orjson.dumps(GRID.envelope(error, REQUEST_ID)).decode().replace('"', '\\"')
        retry = f" hdr retry-after {RETRY_AFTER_S}" if isinstance(error, Rejected) else ""
        lines.append(
            f'http-error status {status} content-type application/json lf-string "{body}" '
            f'hdr x-request-id "{REQUEST_ID}"{retry}'
        )
    return "".join(f"    {line}\n" for line in lines)
