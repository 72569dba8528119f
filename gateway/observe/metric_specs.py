"""The metrics that a gateway process counts, each declared once: name, help, labels, buckets.

A test checks docs/metrics.md against this file. The metrics of engines are in engine_metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
COUNT_BUCKETS = tuple(float(d * 10**n) for n in range(6) for d in (1, 2, 5))
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
SHARE_BUCKETS = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


@dataclass(frozen=True)
class MetricSpec:
    """Declaration of one metric."""

    #: A counter is exported with the suffix `_total`.
    name: str
    help: str
    labels: Sequence[str] = ()
    #: Upper bounds of a histogram's buckets.
    buckets: Sequence[float] = ()
    #: How prometheus_client combines a gauge's values of several processes.
    multiprocess_mode: str = ""

    def make(self, kind: type[Any], registry: CollectorRegistry) -> Any:
        """Register and return the metric; `kind` is Counter, Gauge or Histogram."""
        options: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        if self.multiprocess_mode:
            options["multiprocess_mode"] = self.multiprocess_mode
        return kind(self.name, self.help, self.labels, registry=registry, **options)


class Series:
    """The gateway's metrics. They are created from the annotations, in this order."""

    open_answers: Annotated[
        Gauge,
        MetricSpec(
            "tidegate_open_answers",
            "Inference requests in progress",
            multiprocess_mode="livesum",
        ),
    ]
    requests: Annotated[
        Counter, MetricSpec("tidegate_requests", "HTTP requests", labels=("route", "status"))
    ]
    ends: Annotated[
        Counter,
        MetricSpec(
            "tidegate_request_ends",
            "HTTP requests by how they ended, without health checks and scrapes",
            labels=("end",),
        ),
    ]
    prompt_tokens: Annotated[
        Counter, MetricSpec("tidegate_prompt_tokens", "Prompt tokens of accepted requests")
    ]
    cached_tokens: Annotated[
        Counter,
        MetricSpec("tidegate_cached_tokens", "Prompt tokens found in a cache"),
    ]
    generated_tokens: Annotated[
        Counter,
        MetricSpec(
            "tidegate_generated_tokens",
            "Generated tokens, up to the end of the answer or the disconnect of its client",
        ),
    ]
    finishes: Annotated[
        Counter,
        MetricSpec("tidegate_answers", "Inference requests by finish reason", labels=("finish",)),
    ]
    choices: Annotated[
        Counter,
        MetricSpec(
            "tidegate_choices",
            "Choices of accepted requests, by finish reason",
            labels=("finish",),
        ),
    ]
    first_token_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_time_to_first_token_seconds",
            "Time from the start of a request to its first token",
            buckets=WAIT_BUCKETS,
        ),
    ]
    token_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_time_per_output_token_seconds",
            "Mean time between two tokens of a choice",
            buckets=TOKEN_BUCKETS,
        ),
    ]
    request_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_seconds",
            "Time from the start of an accepted inference request to its end",
            labels=("route",),
            buckets=REQUEST_BUCKETS,
        ),
    ]
    stage_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_stage_seconds",
            "Time that accepted requests spent in each stage",
            labels=("stage",),
            buckets=WAIT_BUCKETS,
        ),
    ]
    inference_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_inference_seconds",
            "Time that accepted requests spent in prefill and decode, recomputation included",
            buckets=REQUEST_BUCKETS,
        ),
    ]
    request_prompt_tokens: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_prompt_tokens",
            "Prompt tokens per accepted request",
            buckets=COUNT_BUCKETS,
        ),
    ]
    request_generated_tokens: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_generated_tokens",
            "Generated tokens per accepted request",
            buckets=COUNT_BUCKETS,
        ),
    ]
    request_max_tokens: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_max_tokens",
            "max_tokens of each choice of an accepted request, if the request set it",
            buckets=COUNT_BUCKETS,
        ),
    ]
    request_choices: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_choices",
            "Choices per accepted request",
            buckets=CHOICE_BUCKETS,
        ),
    ]
    draft_acceptance: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_draft_acceptance",
            "Share of a request's draft tokens that were accepted",
            buckets=SHARE_BUCKETS,
        ),
    ]
    free_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_disconnect_to_free_seconds",
            "Time from a client's disconnect to the release of its slots and blocks in the engine",
            buckets=WAIT_BUCKETS,
        ),
    ]
    handovers: Annotated[
        Counter,
        MetricSpec(
            "tidegate_handovers",
            "Requests whose prompt a prefill engine computed and a decode engine continued",
        ),
    ]
    fallbacks: Annotated[
        Counter,
        MetricSpec(
            "tidegate_handover_fallbacks",
            "Requests whose prompt was computed by the decode engine as a fallback, by cause",
            labels=("cause",),
        ),
    ]
    wire_errors: Annotated[
        Counter,
        MetricSpec(
            "tidegate_gateway_wire_errors",
            "Malformed messages from an engine, dropped by the gateway",
        ),
    ]

    def __init__(self, registry: CollectorRegistry) -> None:
        for attribute, declared in get_type_hints(Series, include_extras=True).items():
            kind, spec = get_args(declared)
            setattr(self, attribute, spec.make(kind, registry))
