"""A finished request becomes spans: their names, attributes, parents and times. Also the error if
OpenTelemetry is not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from gunicorn.errors import AppImportError
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.app import create_app
from gateway.generation.record import AnswerRecord, ChoiceRecord, RequestRecord
from gateway.observe.tracing import Tracing, tracing_to
from protocol.config.gateway import GatewayConfig
from protocol.engine.messages import Times

CHAT = "/v1/chat/completions"
BEGAN_NS = 1_700_000_000_000_000_000
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TIMES = Times(grammar_s=0.5, queued_s=1.0, prefill_s=2.0, decode_s=4.0, preempted_s=8.0)
ANSWER = AnswerRecord(
    finish="stop",
    is_accepted=True,
    choices=[
        ChoiceRecord(
            finish="length",
            generated_tokens=7,
            max_tokens=7,
            temperature=0.5,
            top_p=0.9,
            times=TIMES,
        ),
        ChoiceRecord(
            finish="stop", generated_tokens=3, max_tokens=7, temperature=0.5, top_p=0.9, times=None
        ),
    ],
    prompt_tokens=20,
    cached_tokens=16,
    fetched_tokens=0,
    generated_tokens=10,
    draft_tokens=0,
    accepted_tokens=0,
    preemptions=1,
    tokenize_s=0.25,
    asked_s=0.75,
    first_token_s=4.5,
    answered_s=16.0,
    times=TIMES,
)


def a_record(**changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": "r-1",
        "method": "POST",
        "path": CHAT,
        "route": CHAT,
        "status": 200,
        "key": "",
        "model": "small",
        "end": "finished",
        "started_ns": BEGAN_NS,
        "took_s": 16.5,
        "answer": ANSWER,
    }
    return RequestRecord(**(fields | changes))


def spans_of(
    record: RequestRecord, carrier: Mapping[str, str] | None = None
) -> tuple[ReadableSpan | None, dict[str, ReadableSpan]]:
    """Return the span of a request, and the spans of its stages by name."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    tracing.export(carrier or {}, record)
    tracing.close()
    *stages, whole = exporter.get_finished_spans() or [None]
    return whole, {stage.name: stage for stage in stages if stage is not None}


def test_a_request_is_a_span_named_by_operation_and_model() -> None:
    whole, _ = spans_of(a_record())
    assert (whole.name, whole.kind) == ("chat small", SpanKind.SERVER)
    assert whole.parent is None
    assert (whole.start_time, whole.end_time) == (BEGAN_NS, BEGAN_NS + 16_500_000_000)
    attributes = dict(whole.attributes or {})
    assert (
        attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "tidegate",
            "gen_ai.request.model": "small",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 7,
            "gen_ai.response.finish_reasons": ("length", "stop"),
            "gen_ai.usage.input_tokens": 20,
            "gen_ai.usage.output_tokens": 10,
            "gen_ai.latency.time_in_queue": 1.0,
            "gen_ai.latency.time_to_first_token": 4.5,
            "http.route": CHAT,
            "http.response.status_code": 200,
            "tidegate.request_id": "r-1",
        }.items()
    )
    assert "error.type" not in attributes


def test_stage_spans_follow_one_another_within_the_request() -> None:
    whole, stages = spans_of(a_record())
    times = {
        name: ((span.start_time or 0) - BEGAN_NS, (span.end_time or 0) - BEGAN_NS)
        for name, span in stages.items()
    }
    assert {name: (a / 1e9, b / 1e9) for name, (a, b) in times.items()} == {
        "tokenize": (0.5, 0.75),
        "grammar": (0.75, 1.25),
        "queue": (1.25, 2.25),
        "prefill": (2.25, 4.25),
        "decode": (4.25, 16.25),
    }
    context = whole.get_span_context()
    assert all(s.parent and s.parent.span_id == context.span_id for s in stages.values())


def test_a_span_is_a_child_of_the_traceparent() -> None:
    whole, _ = spans_of(a_record(), {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    context = whole.get_span_context()
    assert f"{context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT


def test_a_request_that_is_not_sampled_leaves_no_span() -> None:
    assert spans_of(a_record(), {"traceparent": f"00-{TRACE}-{PARENT}-00"})[0] is None


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{TRACE}-0000000000000000-01", "00-" * 99])
def test_an_invalid_traceparent_starts_a_new_trace(header: str) -> None:
    whole, _ = spans_of(a_record(), {"traceparent": header})
    assert whole.parent is None


def test_spans_of_refusals_and_failures_have_an_error_type() -> None:
    refused, stages = spans_of(a_record(status=429, end="refused", answer=None))
    assert (refused.attributes or {})["error.type"] == "429"
    assert refused.status.status_code is StatusCode.UNSET  # the client's fault is none of ours
    assert stages == {}
    failed, _ = spans_of(a_record(end="error"))
    assert (failed.attributes or {})["error.type"] == "error"
    assert failed.status.status_code is StatusCode.ERROR


def test_other_routes_leave_no_span() -> None:
    assert spans_of(a_record(route="/v1/models", answer=None)) == (None, {})


def test_without_an_endpoint_there_are_no_traces() -> None:
    assert tracing_to("") is None


def test_a_server_without_the_trace_exporter_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    config = GatewayConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(AppImportError, match=r"--otlp-traces-endpoint .*\[otel\]"):
        create_app(config)
