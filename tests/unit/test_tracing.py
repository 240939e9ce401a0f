"""Traces without a cell: contexts, sampling, encoding, and an exporter whose collector misbehaves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from support.collector import Collector, collecting, decoded
from support.fleet import make_card, make_request, make_view

from grid.config import Tracing, parse
from grid.errors import InvalidRequest
from grid.tracing import exporter as exporting
from grid.tracing import transport as transport_module
from grid.tracing.context import parse_traceparent
from grid.tracing.exporter import TOGETHER, Exporter, ExportingTracer, open_tracer
from grid.tracing.otlp import KEPT_ENDS, Encoder
from grid.tracing.spans import Kind, Span
from grid.tracing.tracer import Tracer
from grid.tracing.transport import GRPC_METHOD, SendFailed, is_loopback
from placement.decide import decide
from placement.traces import spans as spans_of_decision

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def span(name: str = "s", **fields: object) -> Span:
    made = Span(b"t" * 16, b"s" * 8, b"p" * 8, name, Kind.CLIENT, 1.0, 2.5)
    return made._replace(**fields)


# --- contexts and sampling ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"cc-{TRACE}-{PARENT}-01-what-comes-later", True),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{TRACE}-{PARENT}-0 ", None),
        (f"00-{TRACE[:-2]}  -{PARENT}-01", None),
        (f"00-{TRACE[:-1]}--{PARENT}-01", None),
        (f"00-{TRACE[:-4]}--aa-{PARENT}-01", None),
        (f"cc-{TRACE}-{PARENT}-01more", None),
        ("", None),
        ("00-zz", None),
    ],
)
def test_traceparent_is_read_as_the_standard_says(text: str, sampled: bool | None) -> None:
    context = parse_traceparent(text)
    assert (None if context is None else context.sampled) == sampled


@given(st.text(max_size=60) | st.text("0123456789abcdef-", min_size=54, max_size=57))
def test_whatever_a_caller_sends_is_read_or_left(text: str) -> None:
    context = parse_traceparent(text)
    assert context is None or (len(context.trace_id), len(context.span_id)) == (16, 8)


def tracer(spans: list[Span], sample: float = 1.0) -> Tracer:
    return Tracer(spans.append, sample=sample, content=False, rng=random.Random(7))


def test_a_branch_continues_the_callers_trace_and_travels() -> None:
    spans: list[Span] = []
    whole = tracer(spans).request(f"00-{TRACE}-{PARENT}-01")
    assert whole is not None
    inner = tracer(spans).under(whole.child().traceparent)
    assert inner is not None
    inner.end("inner", 1.0, 2.0)
    whole.end("whole", 0.0, 3.0)
    assert {found.trace_id.hex() for found in spans} == {TRACE}
    assert spans[1].parent_id.hex() == PARENT
    assert spans[0].parent_id not in (b"", spans[1].span_id)


def test_a_caller_that_does_not_sample_is_not_traced_whatever_the_share() -> None:
    assert tracer([], sample=1.0).request(f"00-{TRACE}-{PARENT}-00") is None
    assert tracer([], sample=0.0).request(f"00-{TRACE}-{PARENT}-01") is not None
    assert tracer([]).under("") is None


@given(st.floats(0, 1), st.integers(0, 2**32))
def test_a_ratio_traces_the_requests_that_the_sdk_would(ratio: float, seed: int) -> None:
    trace_id = random.Random(seed).getrandbits(128)
    source = Tracer([].append, sample=ratio, content=False, rng=random.Random(seed))
    decision = TraceIdRatioBased(ratio).should_sample(None, trace_id, "POST").decision
    assert (source.request("") is not None) == decision.is_sampled()


@pytest.mark.parametrize(("sample", "least", "most"), [(0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)])
def test_the_share_of_requests_is_kept(sample: float, least: int, most: int) -> None:
    source = tracer([], sample)
    assert least <= sum(source.request("") is not None for _ in range(1000)) <= most


# --- encoding -------------------------------------------------------------------------------

VALUES = (
    st.text(max_size=9)
    | st.text(min_size=50, max_size=200)
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.lists(st.text(max_size=9), max_size=3).map(tuple)
)
ATTRIBUTES = st.dictionaries(
    st.text(max_size=9) | st.text(min_size=40, max_size=140), VALUES, max_size=4
).map(lambda d: tuple(d.items()))
SPANS = st.builds(
    Span,
    trace_id=st.binary(min_size=16, max_size=16),
    span_id=st.binary(min_size=8, max_size=8),
    parent_id=st.just(b"") | st.binary(min_size=8, max_size=8),
    name=st.text(max_size=9) | st.text(min_size=100, max_size=300),
    kind=st.sampled_from(Kind),
    start_s=st.floats(0, 1e6),
    end_s=st.floats(0, 1e6),
    attributes=ATTRIBUTES,
    own=ATTRIBUTES,
    error=st.text(max_size=9),
)


@settings(max_examples=50)
@given(st.lists(SPANS, max_size=2), st.integers(0, 2**61))
def test_the_official_classes_read_what_was_encoded(spans: list[Span], offset_ns: int) -> None:
    encoder = Encoder({"service.name": "zerogrid-test"}, "zerogrid", "1")
    for _ in range(2):  # the second time from what is remembered
        for given_span, seen in zip(
            spans, decoded(encoder.request([encoder.span(each, offset_ns) for each in spans])), strict=True
        ):
            assert seen.service == "zerogrid-test"
            assert seen.trace_id == given_span.trace_id.hex()
            assert seen.parent_id == given_span.parent_id.hex()
            assert (seen.name, seen.kind) == (given_span.name, given_span.kind)
            assert seen.start_ns == int(given_span.start_s * 1e9) + offset_ns
            assert seen.end_ns == int(given_span.end_s * 1e9) + offset_ns
            given_pairs = (*given_span.attributes, *given_span.own)
            wanted = {k: list(v) if isinstance(v, tuple) else v for k, v in given_pairs}
            assert seen.attributes == wanted
            assert seen.error == given_span.error


def test_what_is_remembered_is_bounded() -> None:
    encoder = Encoder({"service.name": "x"}, "zerogrid", "1")
    for number in range(KEPT_ENDS + 10):
        encoder.span(span(str(number)), 0)
    long = (("long", "x" * 10_000),)
    encoder.span(span(attributes=long), 0)
    assert len(encoder._ends) < KEPT_ENDS
    assert ("s", long) not in encoder._ends


def test_what_comes_once_is_not_remembered() -> None:
    encoder = Encoder({"service.name": "x"}, "zerogrid", "1")
    source = tracer([])
    request = make_request(traceparent=f"00-{TRACE}-{PARENT}-01")
    for decode_ms_per_token in (20.0, 21.0):
        view = make_view(make_card(decode_ms_per_token=decode_ms_per_token))
        for made in spans_of_decision(
            source, request, decide(request, view, 0.0, random.Random(7)), 0.0, 50.0
        ):
            encoder.span(made, 0)
    assert len(encoder._ends) == 1


# --- exporting ------------------------------------------------------------------------------


class Refusing:
    """A transport that fails as it is told to, then takes everything."""

    def __init__(self, *failures: SendFailed) -> None:
        self.failures = list(failures)
        self.taken: list[str] = []

    def send(self, body: bytes) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.taken += [seen.name for seen in decoded(body)]

    def close(self) -> None:
        """Holds nothing."""


def exporter(transport: Refusing) -> Exporter:
    return Exporter(transport, Encoder({"service.name": "x"}, "zerogrid", "1"), sleep=lambda _seconds: False)


AWAY = SendFailed("away", retryable=True)


@pytest.mark.parametrize(
    ("failures", "sent", "dropped"),
    [
        ([], 1, 0),
        ([AWAY, AWAY], 1, 0),
        ([AWAY, AWAY, AWAY], 0, 1),
        ([SendFailed("wrong key", retryable=False)], 0, 1),
    ],
)
def test_a_batch_is_tried_a_few_times(failures: list[SendFailed], sent: int, dropped: int) -> None:
    sender = exporter(Refusing(*failures))
    sender.put(span())
    sender.close()
    assert (sender.sent, sender.dropped) == (sent, dropped)


def test_a_full_queue_drops_instead_of_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "MAX_QUEUED_SPANS", 2)
    monkeypatch.setattr(exporting, "PERIOD_S", 60.0)
    transport = Refusing()
    sender = exporter(transport)
    for name in "abc":
        sender.put(span(name))
    sender.close()
    assert (transport.taken, sender.dropped) == (["a", "b"], 1)


def test_requests_are_described_together_and_the_last_ones_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporting, "PERIOD_S", 60.0)
    described: list[int] = []

    def describe(number: int) -> list[Span]:
        described.append(number)
        return [span(f"{number}a"), span(f"{number}b")]

    transport = Refusing()
    sender = exporter(transport)
    for number in range(TOGETHER - 1):
        sender.later(describe, (number,))
    assert described == []
    for number in range(TOGETHER - 1, TOGETHER + 1):
        sender.later(describe, (number,))
    assert described == [*range(TOGETHER)]
    sender.close()
    assert described == [*range(TOGETHER + 1)]
    assert len(transport.taken) == sender.sent == 2 * len(described)


def test_spans_that_cannot_be_made_are_nobody_elses_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[Span]:
        raise AssertionError("".join(["se", "cret"]))

    transport = Refusing()
    sender = exporter(transport)
    sender.later(broken, ())
    sender.put(span("good"))
    sender.close()
    assert (transport.taken, sender.dropped) == (["good"], 1)
    assert "AssertionError" in caplog.text
    assert "in broken" in caplog.text
    assert "secret" not in caplog.text


def test_what_is_put_before_the_end_is_sent_however_late_the_thread_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Exporter._run

    def late(sender: Exporter) -> None:
        sender._closing.wait()
        run(sender)

    monkeypatch.setattr(Exporter, "_run", late)
    transport = Refusing()
    sender = exporter(transport)
    sender.put(span("last"))
    sender.close()
    assert (transport.taken, sender.dropped) == (["last"], 0)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def one_span(source: ExportingTracer | None) -> None:
    assert source is not None
    branch = source.request("")
    assert branch is not None
    branch.end("hello", 0.0, 1.0)
    source.close()


def test_http_goes_to_the_path_of_the_standard_with_the_operators_headers(
    collector: Collector, tmp_path: object
) -> None:
    headers = f"{tmp_path}/headers"
    with open(headers, "w") as file:
        file.write("X-Team: grid\n\nauthorization: Bearer a:b\n")
    collector.answers = [503]
    one_span(
        open_tracer(Tracing(endpoint=collector.endpoint + "/", headers_file=headers), "gateway", "g1", "eu")
    )
    # The failed try waits for the collector, but a process that ends does not.
    assert [seen["path"] for seen in collector.headers] == ["/v1/traces"]
    assert collector.headers[0]["x-team"] == "grid"
    assert collector.headers[0]["authorization"] == "Bearer a:b"
    one_span(open_tracer(Tracing(endpoint=collector.endpoint), "gateway", "g1", "eu"))
    assert [(seen.service, seen.name) for seen in collector.spans] == [("zerogrid-gateway", "hello")]


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://127.0.0.1:4318", True),
        ("http://localhost", True),
        ("http://[::1]:4318/v1/traces", True),
        ("https://collector.example:4318", False),
        ("http://10.0.0.7:4318", False),
    ],
)
def test_only_what_stays_on_the_machine_is_sent_as_it_is(endpoint: str, expected: bool) -> None:
    assert is_loopback(endpoint) is expected


def test_what_goes_over_a_line_is_compressed(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    one_span(open_tracer(Tracing(endpoint=collector.endpoint), "gateway", "g1", "eu"))
    monkeypatch.setattr(transport_module, "is_loopback", lambda _endpoint: False)
    one_span(open_tracer(Tracing(endpoint=collector.endpoint), "gateway", "g1", "eu"))
    assert [seen.get("content-encoding") for seen in collector.headers] == [None, "gzip"]
    assert [seen.name for seen in collector.spans] == ["hello", "hello"]


def test_grpc_reaches_the_trace_service() -> None:
    taken: list[str] = []

    def export(body: bytes, _context: grpc.ServicerContext) -> bytes:
        taken.extend(seen.name for seen in decoded(body))
        return b""

    service, method = GRPC_METHOD[1:].split("/")
    handler = grpc.method_handlers_generic_handler(
        service, {method: grpc.unary_unary_rpc_method_handler(export)}
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        one_span(
            open_tracer(Tracing(endpoint=f"http://127.0.0.1:{port}", protocol="grpc"), "unit", "u", "eu")
        )
    finally:
        server.stop(None).wait()
    assert taken == ["hello"]


# --- configuration --------------------------------------------------------------------------


def test_without_an_endpoint_there_is_no_tracer() -> None:
    assert open_tracer(Tracing(), "gateway", "g", "eu") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "tracing: {endpoint: 'localhost:4318'}",
            "tracing.endpoint: 'localhost:4318' should begin with http",
        ),
        ("tracing: {sample: 2}", "tracing.sample: 2 was given"),
        ("tracing: {protocol: udp}", "tracing.protocol"),
    ],
)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(text, "grid.yaml")
    assert says in raised.value.message


@pytest.mark.parametrize(("content", "says"), [(None, "can't be read"), ("nonsense\n", "name: value")])
def test_a_headers_file_that_cannot_be_used_is_named(
    tmp_path: object, content: str | None, says: str
) -> None:
    path = f"{tmp_path}/headers"
    if content is not None:
        with open(path, "w") as file:
            file.write(content)
    with pytest.raises(InvalidRequest, match=r"tracing\.headers_file") as raised:
        open_tracer(Tracing(endpoint="http://127.0.0.1:1", headers_file=path), "gateway", "g", "eu")
    assert says in raised.value.message
