"""Traces of requests: spans made from times that the code measures anyway, exported by OTLP.

`spans.py` says what a span is, `context.py` how its place travels (W3C `traceparent`), `tracer.py` makes
spans, `otlp.py` encodes them, `exporter.py` and `transport.py` send them; `collector.py` says as whom, for
the gateway's figures as well. Where `tracing.endpoint` is empty no tracer exists: nobody makes a span, and
no message carries a context.
"""
