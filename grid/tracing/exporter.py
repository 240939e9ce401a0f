"""Sends spans to a collector by OTLP, from a thread of its own; nothing here ever makes a request wait.

What a request leaves behind is kept as it is, and becomes spans and bytes a few dozen requests at a time: the
same code once a request, with all else that serves it in between, never finds itself in the processor's
caches and takes several times as long. The queue of what waits to be sent is bounded: what a slow or absent
collector leaves no room for is dropped, counted, and said in the log once in a while.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from importlib.metadata import version

from grid.config import Tracing
from grid.tracing.collector import SCOPE, headers_in, resource_of
from grid.tracing.otlp import Encoder
from grid.tracing.spans import Span
from grid.tracing.tracer import Describe, Tracer
from grid.tracing.transport import SendFailed, Transport, open_transport

log = logging.getLogger(__name__)

TOGETHER = 64
"""Descriptions that are carried out at once: about half a millisecond, in which nothing else runs here."""
MOST_WAITING = 4 * TOGETHER
"""While the thread describes, requests only add to what waits; from here on they wait for it."""
MAX_QUEUED_SPANS = 16_384
"""Seconds of a busy replica's spans, a few MB: a collector's restart is bridged, an outage is not."""
BATCH_SPANS = 2048
"""At most a megabyte, a quarter of what collectors take in one message; each costs a few ms to send."""
PERIOD_S = 2.0
"""How late a span of a quiet cell may be seen."""
TRIES = 3
FIRST_BACKOFF_S = 0.5
CLOSE_TIMEOUT_S = 3.0
"""How long a process that ends waits for its last spans to leave."""
CLOCK_READINGS = 5
CLOCK_STEP_NS = 10_000_000
COMPLAINT_PERIOD_S = 60.0


class Exporter:
    """`put` and `later` are for one thread; `close` sends what is left."""

    def __init__(
        self, transport: Transport, encoder: Encoder, *, sleep: Callable[[float], bool] | None = None
    ) -> None:
        self.sent = 0
        self._overflowed = 0
        self._failed = 0
        self._transport = transport
        self._encoder = encoder
        self._offset_ns = wall_offset_ns()
        self._waiting: deque[tuple[Describe, tuple[object, ...]]] = deque()
        self._describing = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._sleep = sleep or self._closing.wait
        self._complained_s = -COMPLAINT_PERIOD_S
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that found no room or that the collector did not take."""
        return self._overflowed + self._failed

    def put(self, span: Span) -> None:
        self.later(_alone, (span,))

    def later(self, describe: Describe, facts: tuple[object, ...]) -> None:
        """Take the spans that `describe(*facts)` will return. TOGETHER of them are described here and not in
        the thread, which would keep the event loop waiting for the interpreter's lock, milliseconds at a
        time; the thread takes those of a quiet process."""
        self._waiting.append((describe, facts))
        waiting = len(self._waiting)
        if waiting >= TOGETHER and self._describing.acquire(blocking=waiting >= MOST_WAITING):
            try:
                self._describe()
            finally:
                self._describing.release()

    def close(self) -> None:
        """Send what is left, within CLOSE_TIMEOUT_S. Idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                self._wake.wait(PERIOD_S)
                self._wake.clear()
                # Asked before the queue is emptied: what was put before the end leaves too.
                is_last = self._closing.is_set()
                self._follow_the_clock()
                with self._describing:
                    self._describe()
                while self._queue:
                    self._send(self._batch())
        finally:
            self._transport.close()

    def _describe(self) -> None:
        """Make bytes of all that waits now. Under the lock: not of what comes meanwhile, which would let a
        busy process hand everything to its thread."""
        queue, encode, offset_ns = self._queue, self._encoder.span, self._offset_ns
        before = len(queue)
        for _ in range(len(self._waiting)):
            describe, facts = self._waiting.popleft()
            try:
                spans = [encode(span, offset_ns) for span in describe(*facts)]
            except Exception as error:
                # A bug, which must not become an error of the request that happens to come next. Not its
                # message, which could quote a prompt.
                where = "".join(traceback.format_tb(error.__traceback__))
                log.error("tracing: no spans of a request, for %s\n%s", type(error).__name__, where)
                self._failed += 1
                continue
            if len(queue) + len(spans) > MAX_QUEUED_SPANS:
                self._overflowed += len(spans)
            else:
                queue.extend(spans)
        if before < BATCH_SPANS <= len(queue):
            self._wake.set()

    def _follow_the_clock(self) -> None:
        """Take a clock that was set. A smaller change is how exactly two clocks can be read, and would only
        move the spans of one trace against each other."""
        offset_ns = wall_offset_ns()
        if abs(offset_ns - self._offset_ns) > CLOCK_STEP_NS:
            self._offset_ns = offset_ns

    def _batch(self) -> list[bytes]:
        return [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_SPANS))]

    def _send(self, spans: list[bytes]) -> None:
        body = self._encoder.request(spans)
        for attempt in range(TRIES):
            try:
                self._transport.send(body)
            except SendFailed as error:
                if error.retryable and attempt + 1 < TRIES and not self._sleep(FIRST_BACKOFF_S * 2**attempt):
                    continue
                self._failed += len(spans)
                self._complain(error)
            else:
                self.sent += len(spans)
            return

    def _complain(self, error: SendFailed) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAINT_PERIOD_S:
            self._complained_s = now_s
            log.warning("tracing: %s; %d spans dropped so far (tracing.endpoint)", error, self.dropped)


def _alone(span: Span) -> Iterable[Span]:
    return (span,)


def wall_offset_ns() -> int:
    """Return what turns monotonic into wall time, from the closest of a few readings."""
    readings = []
    for _ in range(CLOCK_READINGS):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


class ExportingTracer(Tracer):
    """A tracer that owns its exporter."""

    def __init__(self, settings: Tracing, exporter: Exporter) -> None:
        super().__init__(exporter.put, sample=settings.sample, content=settings.content, rng=random.Random())
        self.exporter = exporter

    def later(self, describe: Describe, *facts: object) -> None:
        self.exporter.later(describe, facts)

    def close(self) -> None:
        self.exporter.close()


def open_tracer(settings: Tracing, service: str, instance: str, region: str) -> ExportingTracer | None:
    """Return the tracer of a process; None where tracing is off. `service` is what the process is to the cell
    (`gateway`, `placement`, `unit`). Raises InvalidRequest for a headers file that can't be used."""
    if not settings.endpoint:
        return None
    headers = headers_in(settings.headers_file, "tracing.headers_file")
    attributes = resource_of(service, instance, region).attributes
    encoder = Encoder({name: str(value) for name, value in attributes.items()}, SCOPE, version(SCOPE))
    return ExportingTracer(settings, Exporter(open_transport(settings, headers), encoder))
