"""Versions of this interface, and the one adapter between the first and the current one. Pure.

Everything behind the edge knows the current version only: an older caller's body is rewritten before it is
parsed, and what it is told is rewritten before it is encoded. What changed since `2024-06-15`:

- A conversation is `messages`. In the first version `input` could hold it as well, so that a list under
  `input` was one conversation and a list under `inputs` many questions, with one letter between them.
- An error's counts and reasons are its `details`. In the first version they stood among the fixed fields,
  where a count could have hidden a field, and no schema could name either.

Another version becomes one more entry of `ADAPTERS`, written against the version after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from gateway.http.errors import GRID, Ecosystem
from grid.errors import GridError, InvalidRequest

FIRST = "2024-06-15"
CURRENT = "2026-12-01"
"""What a call without a header gets."""
VERSIONS = (FIRST, CURRENT)

HEADER = "grid-version"
ALIAS = "anthropic-version"
MESSAGES_PREFIX = "/v1/messages"
MESSAGES_API = ("2023-06-01", "2026-10-21")
"""Versions of Anthropic's Messages API, one of which its clients send on every call in the alias' place. What
they share is what is served; sampling, which the later one took away, is honoured in both."""
MESSAGES_CLIENTS = (MESSAGES_PREFIX, "/v1/models")
"""What those clients call: the routes of that API, and the list of models."""
RUNS = ("/v1/pipeline", "/v1/pipelines/")
"""Where bodies with an `input` go: the one-shot route, and a pipeline's own routes."""


Renamed = Mapping[str, str]
"""The next version's fields whose values stood under another name in a body → that name."""
AS_IT_CAME: Renamed = MappingProxyType({})


class Adapter(NamedTuple):
    """Between one version and the next."""

    request: Callable[[str, bytes], tuple[bytes, Renamed]]
    """(path, that version's body) → the next version's; what is not JSON is left to its parser."""
    error: Callable[[dict[str, Any], Renamed], dict[str, Any]]
    """(the next version's error, or data of an `error` event) → that version's, with the caller's names."""


def first_request(path: str, body: bytes) -> tuple[bytes, Renamed]:
    """Return the current version's body for one of the first version."""
    if path != RUNS[0] and not path.startswith(RUNS[1]):
        return body, AS_IT_CAME
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body, AS_IT_CAME
    if not isinstance(given, dict) or not isinstance(given.get("input"), list):
        return body, AS_IT_CAME
    if given.get("messages") is not None:
        return body, AS_IT_CAME  # both were never allowed; the parser says so
    given["messages"] = given.pop("input")
    return orjson.dumps(given), {"messages": "input"}


def first_error(payload: dict[str, Any], renamed: Renamed = AS_IT_CAME) -> dict[str, Any]:
    """Return the first version's error for one of the current version; its fixed fields come last, so that
    no detail hides one."""
    error = as_written(payload["error"], renamed)
    fixed = {name: value for name, value in error.items() if name != "details"}
    return {**payload, "error": {**error["details"], **fixed}}


def as_written(error: dict[str, Any], renamed: Renamed) -> dict[str, Any]:
    """Return an error of the current version that names the fields of a body as its caller wrote them: in its
    `param`, in its message, and in the further faults that `details` may list."""
    for field, written in renamed.items():
        # A path of the field, or its name where a sentence quotes it; as a plain word it stays.
        named = re.compile(rf"(?<![\w.]){field}(?=\[|: |$)|(?<=`){field}(?=`)")
        error = {**error, "details": {**error["details"]}}
        listed = error["details"].get("errors")
        faults = [dict(fault) for fault in listed] if isinstance(listed, list) else []
        for told in (error, *faults):
            for key in ("param", "message"):
                if isinstance(told.get(key), str):
                    told[key] = named.sub(written, told[key])
        if faults:
            error["details"]["errors"] = faults
    return error


ADAPTERS = {FIRST: Adapter(first_request, first_error)}
"""By the version of the caller; the current one needs none."""


def version_asked(given: str | None, alias: str | None, path: str) -> str:
    """Return the version that the two headers (None: not sent) ask for on `path`.

    Raises InvalidRequest, with the list, for one that isn't served, and for two that disagree.
    """
    if path.startswith(MESSAGES_CLIENTS) and alias in MESSAGES_API:
        alias = None
    for name, asked in ((HEADER, given), (ALIAS, alias)):
        if asked is not None and asked not in VERSIONS:
            raise InvalidRequest(
                f"{name}: {asked[:64]!r} is not served; supported: {', '.join(VERSIONS)}",
                param=name,
                supported=list(VERSIONS),
            )
    if given is not None and alias is not None and given != alias:
        raise InvalidRequest(
            f"{ALIAS}: {alias} contradicts {HEADER}: {given}; the two are one header, so send one",
            param=ALIAS,
        )
    return given or alias or CURRENT


def served_headers(version: str) -> list[tuple[bytes, bytes]]:
    """Return what a response in `version` says of it; `deprecation` is since when, as in RFC 9745."""
    headers = [(b"grid-version-served", version.encode())]
    if version != CURRENT:
        following = VERSIONS[VERSIONS.index(version) + 1]
        since = datetime.fromisoformat(following).replace(tzinfo=UTC)
        headers.append((b"deprecation", b"@%d" % since.timestamp()))
    return headers


def ecosystem_of(version: str, renamed: Renamed = AS_IT_CAME) -> Ecosystem:
    """Return how the grid's own routes tell of errors in `version`, to the caller of a body whose fields were
    `renamed`."""
    adapter = ADAPTERS.get(version)
    if adapter is None:
        return GRID

    def envelope(error: GridError, request_id: str) -> dict[str, Any]:
        return adapter.error(GRID.envelope(error, request_id), renamed)

    return Ecosystem(GRID.status, envelope)
