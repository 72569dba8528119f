"""All series that a gateway process counts, each declared once: name, meaning, labels, buckets.

Docs: docs/metrics.md, which is checked against this. What engines tell of themselves is in
engine_metrics.py.
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
    """How a series is told. A counter's name is told with `_total` behind it.

    buckets  upper bounds, of a histogram
    many     of a gauge: what the values of several processes make together
    """

    name: str
    about: str
    labels: Sequence[str] = ()
    buckets: Sequence[float] = ()
    many: str = ""

    def make(self, kind: type[Any], registry: CollectorRegistry) -> Any:
        more: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
        if self.many:
            more["multiprocess_mode"] = self.many
        return kind(self.name, self.about, self.labels, registry=registry, **more)


class Series:
    """Made from its annotations, in their order."""

    open_answers: Annotated[
        Gauge,
        MetricSpec(
            "tidegate_open_answers", "Inference requests being answered now", many="livesum"
        ),
    ]
    requests: Annotated[
        Counter, MetricSpec("tidegate_requests", "HTTP requests", labels=("route", "status"))
    ]
    ends: Annotated[
        Counter,
        MetricSpec("tidegate_request_ends", "HTTP requests, without probes", labels=("end",)),
    ]
    prompt_tokens: Annotated[
        Counter, MetricSpec("tidegate_prompt_tokens", "Tokens of accepted prompts")
    ]
    cached_tokens: Annotated[
        Counter, MetricSpec("tidegate_cached_tokens", "Of these, tokens found in a cache")
    ]
    generated_tokens: Annotated[
        Counter,
        MetricSpec(
            "tidegate_generated_tokens", "Tokens generated for clients, as far as they were read"
        ),
    ]
    finishes: Annotated[
        Counter, MetricSpec("tidegate_answers", "Answers by how they ended", labels=("finish",))
    ]
    choices: Annotated[
        Counter,
        MetricSpec(
            "tidegate_choices",
            "Choices of accepted answers, by how they ended",
            labels=("finish",),
        ),
    ]
    first_token_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_time_to_first_token_seconds",
            "From the beginning of a request to its first token",
            buckets=WAIT_BUCKETS,
        ),
    ]
    token_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_time_per_output_token_seconds",
            "Of a choice, the mean time between two of its tokens",
            buckets=TOKEN_BUCKETS,
        ),
    ]
    request_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_seconds",
            "From the beginning of an accepted inference request to its end",
            labels=("route",),
            buckets=REQUEST_BUCKETS,
        ),
    ]
    stage_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_stage_seconds",
            "Where the time of accepted requests went",
            labels=("stage",),
            buckets=WAIT_BUCKETS,
        ),
    ]
    inference_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_inference_seconds",
            "Of an accepted request: prefill, decode and what was computed again",
            buckets=REQUEST_BUCKETS,
        ),
    ]
    request_prompt_tokens: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_prompt_tokens",
            "Per accepted request: tokens of prompts",
            buckets=COUNT_BUCKETS,
        ),
    ]
    request_generated_tokens: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_generated_tokens",
            "Per accepted request: tokens generated",
            buckets=COUNT_BUCKETS,
        ),
    ]
    request_max_tokens: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_max_tokens",
            "Per accepted request: max_tokens, where it was given",
            buckets=COUNT_BUCKETS,
        ),
    ]
    request_choices: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_request_choices",
            "Per accepted request: choices asked for",
            buckets=CHOICE_BUCKETS,
        ),
    ]
    draft_acceptance: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_draft_acceptance",
            "Of the tokens that were guessed ahead for a request, the share that is in its answers",
            buckets=SHARE_BUCKETS,
        ),
    ]
    free_s: Annotated[
        Histogram,
        MetricSpec(
            "tidegate_disconnect_to_free_seconds",
            "From noticing that a client has gone until the engine has its slots and blocks back",
            buckets=WAIT_BUCKETS,
        ),
    ]
    handovers: Annotated[
        Counter,
        MetricSpec(
            "tidegate_handovers",
            "Requests whose prompt one engine computed and another went on from",
        ),
    ]
    fallbacks: Annotated[
        Counter,
        MetricSpec(
            "tidegate_handover_fallbacks",
            "Requests whose prompt the decode engine computed although another should have",
            labels=("cause",),
        ),
    ]
    wire_errors: Annotated[
        Counter,
        MetricSpec(
            "tidegate_gateway_wire_errors",
            "Messages of an engine that made no sense, and were dropped",
        ),
    ]

    def __init__(self, registry: CollectorRegistry) -> None:
        for attribute, declared in get_type_hints(Series, include_extras=True).items():
            kind, told = get_args(declared)
            setattr(self, attribute, told.make(kind, registry))
