"""What everything that goes to a collector has in common: who sends it, and the headers that it asks for.

The resource is the OpenTelemetry SDK's. It is made of what the cell is configured as: `Resource.create` would
read the environment as well.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from grid.errors import InvalidRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

SCOPE = "zerogrid"


def resource_of(service: str, instance: str, region: str) -> Resource:
    """Return who sends. `service` is what it is to the cell (`gateway`, `placement`, `unit`; `cell` for all
    of it), `instance` which of these."""
    # A tenth of a second to import, which only those pay who send something.
    from opentelemetry.sdk import resources

    return resources.Resource(
        {
            resources.SERVICE_NAMESPACE: SCOPE,
            resources.SERVICE_NAME: f"{SCOPE}-{service}",
            resources.SERVICE_INSTANCE_ID: instance,
            resources.SERVICE_VERSION: version(SCOPE),
            resources.CLOUD_REGION: region,
        }
    )


def headers_in(path: str, key: str) -> dict[str, str]:
    """Return the headers in a file of `name: value` lines, none for "". `key` is what the configuration calls
    it. Raises InvalidRequest for a file that can't be used."""
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise InvalidRequest(f"{key}: {path} can't be read: {error.strerror}", param=key) from None
    pairs = [line.partition(":") for line in lines]
    if not all(name.strip() and colon for name, colon, _ in pairs):
        raise InvalidRequest(f"{key}: each line should be `name: value`", param=key)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
