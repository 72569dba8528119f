"""Traces of inference requests, exported by OpenTelemetry (extra `otel`).

OpenTelemetry is imported only if --otlp-traces-endpoint is set. A finished request becomes one span
with a child span for each stage. All of them are made from the request's record. Names follow the
GenAI semantic conventions; the latency attributes are vLLM's. If the request has the header
`traceparent`, its span is a child of the span in that header, and is exported if the header marks
that span as sampled.

The engine reports how long each stage took, but not when it started. So each child span starts at
the end of the previous one. The time lost to preemptions is added to the last span, "decode".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gateway.generation.record import AnswerRecord, RequestRecord
from gateway.served_model import version
from protocol.process.installation import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

OPTION = "--otlp-traces-endpoint"
PROVIDER = "tidegate"
HEADERS = ("traceparent", "tracestate")
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/inference/v1/generate": "text_completion",
}
"""Route whose requests are traced -> operation name of the semantic conventions."""
NS = 1_000_000_000
"""Nanoseconds in a second."""
CLOSE_S = 2.0
"""Longest time for sending pending spans at the end of the process."""

Attributes = dict[str, Any]


class Tracing:
    """Exports the spans of finished requests.

    processor   OpenTelemetry's receiver of ended spans
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "tidegate", "service.version": version()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tidegate.gateway", version())
        self._propagator = TraceContextTextMapPropagator()

    def export(self, carrier: Mapping[str, str], record: RequestRecord) -> None:
        """Export the spans of a request, if OPERATIONS has its route. `carrier` contains the
        request's headers in HEADERS."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if record.route not in OPERATIONS:
            return
        span = self._tracer.start_span(
            f"{OPERATIONS[record.route]} {record.model}".rstrip(),
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=record.started_ns,
            attributes=attributes_of(record),
        )
        if record.end == "error":
            span.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(span)
        for name, start_ns, end_ns in stages_of(record):
            stage = self._tracer.start_span(name, context=within, start_time=start_ns)
            stage.end(end_ns)
        span.end(record.started_ns + _ns(record.took_s))

    def close(self) -> None:
        """Send pending spans, but give up after CLOSE_S.

        So a collector that does not answer cannot block the shutdown.
        """
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(CLOSE_S)


def tracing_to(endpoint: str) -> Tracing | None:
    """Return the exporter of spans to the URL `endpoint`; None if it is "", so tracing is off.

    A thread of the SDK, which is a greenlet under gevent, sends the spans in batches. Raises
    ValueError if OpenTelemetry is not installed or the URL is invalid.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"{OPTION} needs OpenTelemetry, which is not installed: {install_command('otel')} "
            f"({error})"
        ) from None
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"{OPTION} {endpoint}: expected a URL such as http://127.0.0.1:4318/v1/traces"
        )
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


# ---- the contents of spans


def attributes_of(record: RequestRecord) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": OPERATIONS[record.route],
        "gen_ai.provider.name": PROVIDER,
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "tidegate.request_id": record.request_id,
        "tidegate.end": record.end,
        "gen_ai.latency.e2e": record.took_s,
    }
    if record.model:
        attributes |= {
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
        }
    if record.end in ("error", "refused"):
        attributes["error.type"] = str(record.status) if record.status >= 400 else record.end
    if record.answer is not None:
        attributes |= _answer_attributes(record.answer)
    return attributes


def _answer_attributes(answer: AnswerRecord) -> Attributes:
    first, times = answer.choices[0], answer.times
    attributes: Attributes = {
        "gen_ai.request.temperature": first.temperature,
        "gen_ai.request.top_p": first.top_p,
        "gen_ai.request.choice.count": len(answer.choices),
    }
    if first.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = first.max_tokens
    if not answer.is_accepted:
        return attributes
    attributes |= {
        "gen_ai.response.finish_reasons": [choice.finish for choice in answer.choices],
        "gen_ai.usage.input_tokens": answer.prompt_tokens,
        "gen_ai.usage.output_tokens": answer.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.cached_tokens,
        "gen_ai.latency.time_in_queue": times.queued_s,
        "gen_ai.latency.time_in_model_prefill": times.prefill_s,
        "gen_ai.latency.time_in_model_decode": times.decode_s,
        "gen_ai.latency.time_in_model_inference": times.prefill_s + times.decode_s,
    }
    if answer.first_token_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = answer.first_token_s
    return attributes


def stages_of(record: RequestRecord) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, end) of each stage that took any time, in nanoseconds since 1970."""
    answer = record.answer
    if answer is None or answer.asked_s is None:
        return
    times, asked_s = answer.times, answer.asked_s
    at_s = max(0.0, asked_s - answer.tokenize_s)
    for name, took_s in (
        ("tokenize", asked_s - at_s),
        ("grammar", times.grammar_s),
        ("queue", times.queued_s),
        ("fetch", times.fetching_s),
        ("encode", times.encoding_s),
        ("prefill", times.prefill_s),
        ("decode", times.decode_s + times.preempted_s),
    ):
        if took_s > 0:
            start_ns = record.started_ns + _ns(at_s)
            yield name, start_ns, start_ns + _ns(took_s)
            at_s += took_s


def _ns(seconds: float) -> int:
    return int(seconds * NS)
