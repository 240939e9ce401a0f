"""The garbage collector in processes that serve: what is there once they serve is not walked over again."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""Net new objects until the collector looks at the young ones: hundreds of requests. At Python's 700 it looks
every few requests, at objects that are all in use."""


def freeze() -> None:
    """Call once everything is loaded: Ray and the libraries hold some 300,000 objects, and a walk over them
    stops the process for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
