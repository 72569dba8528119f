"""The exported metrics: all statistics of engines, and the accepted drafts of each request."""

from __future__ import annotations

import msgspec
from prometheus_client.core import Metric

from gateway.context import RequestContext
from gateway.observe.metrics import ENGINE_METRICS, Metrics, engine_metrics
from protocol.messages import Accepted, Output, Usage
from protocol.stats import EngineStats
from tests.support.answers import new_choice_group


def test_every_engine_statistic_has_a_metric() -> None:
    stats = msgspec.structs.asdict(EngineStats())
    del stats["worker"]  # no metric: the current work of the worker, which /readyz shows
    assert {series.field: bool(series.labels) for series in ENGINE_METRICS} == {
        name: isinstance(value, dict) for name, value in stats.items()
    }
    assert len({series.name for series in ENGINE_METRICS}) == len(ENGINE_METRICS)


def samples(metrics: list[Metric]) -> dict[tuple[str, ...], float]:
    """Return the value of each sample, by a tuple of its name and its label values."""
    return {
        (sample.name.removeprefix("tidegate_engine_"), *sample.labels.values()): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_each_tier_has_its_series_and_each_engine_its_labels() -> None:
    one = EngineStats(
        running=1,
        tier_blocks={"host": 2, "disk": 3},
        tier_bytes={"host": 4, "disk": 5},
        num_tier_stored={"disk": 6},
        num_tier_dropped={"disk": 7},
        num_tier_loaded={"host": 8},
        num_tier_failed={"host": 9},
    )
    told = [(["decode", "here"], one), (["prefill", "there"], EngineStats(running=7))]
    found = samples(list(engine_metrics(told, ["role", "address"])))
    assert found["running", "decode", "here"] == 1
    assert found["running", "prefill", "there"] == 7
    expected = {
        ("tier_blocks", "host"): 2,
        ("tier_blocks", "disk"): 3,
        ("tier_bytes", "host"): 4,
        ("tier_bytes", "disk"): 5,
        ("tier_blocks_stored_total", "disk"): 6,
        ("tier_blocks_dropped_total", "disk"): 7,
        ("tier_blocks_loaded_total", "host"): 8,
        ("tier_blocks_failed_total", "host"): 9,
    }
    tiers = {key: value for key, value in found.items() if key[0].startswith("tier_")}
    assert tiers == {(name, "decode", "here", tier): n for (name, tier), n in expected.items()}


def test_requests_with_drafts_are_observed_with_their_acceptance_rate() -> None:
    metrics = Metrics(list)
    for drafts, accepted in ((8, 6), (4, 0), (0, 0)):
        answer = new_choice_group()
        usage = Usage(
            prompt_tokens=3, generated_tokens=9, draft_tokens=drafts, accepted_tokens=accepted
        )
        answer.on_report(answer.choices[0], Accepted(request=0))
        answer.on_report(answer.choices[0], Output(request=0, tokens=[72], usage=usage))
        context = RequestContext(metrics, method="POST", path="/v1/x", route="/v1/x")
        context.timeline = answer.timeline
        context.start_inference(answer)
        context.close(200)
    text = metrics.text().decode()
    assert "tidegate_draft_acceptance_count 2.0" in text
    assert "tidegate_draft_acceptance_sum 0.75" in text
    assert 'tidegate_draft_acceptance_bucket{le="0.0"} 1.0' in text
    assert 'tidegate_draft_acceptance_bucket{le="0.7"} 1.0' in text
