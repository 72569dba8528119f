"""The exported metrics: all statistics of engines, and the accepted drafts of each request."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from prometheus_client.core import Metric

from gateway.context import RequestContext
from gateway.observe.metrics import ENGINE_METRICS, Metrics, cache_info, engine_metrics
from gateway.observe.vllm_names import aliased
from protocol.engine.messages import Accepted, Limits, Output, Usage
from protocol.engine.stats import EngineStats
from tests.support.answers import new_choice_group


def test_every_engine_statistic_has_a_metric() -> None:
    stats = msgspec.structs.asdict(EngineStats())
    del stats["kv_dtype"]  # a label of tidegate_engine_cache_info
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


def test_pickers_read_one_sample_for_all_engines() -> None:
    limits = Limits(
        max_len=64, max_slots=2, block_tokens=16, num_blocks=101, token_budget=32, prefix_cache=True
    )
    prefill = EngineStats(running=1, waiting=2, free_blocks=100, total_blocks=100)
    decode = EngineStats(
        running=3, waiting=4, free_blocks=50, total_blocks=300, num_prompt_tokens=7
    )
    names, engines = ["role", "address"], [(["prefill", "a"], prefill), (["decode", "b"], decode)]
    windowed = replace(limits, num_blocks=301, kv_window=4096)
    known = [(["prefill", "a"], prefill, limits), (["decode", "b"], decode, windowed)]
    ours = [*engine_metrics(engines, names), *cache_info(known, names)]
    told = [sample for metric in aliased(ours, "small") for sample in metric.samples]
    values = {sample.name.removeprefix("vllm:"): sample.value for sample in told}
    assert len(values) == len(told)
    assert values["num_requests_running"] == 4
    assert values["num_requests_waiting"] == 6
    assert values["kv_cache_usage_perc"] == values["gpu_cache_usage_perc"] == 250 / 400
    assert values["prefix_cache_queries_total"] == 7
    labels = {sample.name: sample.labels for sample in told}
    assert labels["vllm:num_requests_running"] == {"model_name": "small"}
    assert labels["vllm:cache_config_info"] == {
        "model_name": "small",
        "block_size": "16",
        "num_gpu_blocks": "402",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "sliding_window": "None",
    }
    windows = [sample.labels["window"] for sample in next(cache_info(known, names)).samples]
    assert windows == ["", "4096"]


def test_each_model_has_its_own_sample_under_vllms_names() -> None:
    names = ["model_name", "address"]
    engines = [
        (["a", "x"], EngineStats(waiting=1, free_blocks=50, total_blocks=100)),
        (["b", "y"], EngineStats(waiting=2, free_blocks=0, total_blocks=100)),
        (["b", "z"], EngineStats(waiting=4, free_blocks=100, total_blocks=100)),
    ]
    told = [s for m in aliased(engine_metrics(engines, names), "a") for s in m.samples]
    found = {(s.name, s.labels["model_name"]): s.value for s in told}
    assert len(found) == len(told)
    assert [found["vllm:num_requests_waiting", model] for model in "ab"] == [1, 6]
    assert [found["vllm:kv_cache_usage_perc", model] for model in "ab"] == [0.5, 0.5]


def test_requests_with_drafts_are_observed_with_their_acceptance_rate() -> None:
    metrics = Metrics(list)
    for drafts, accepted in ((8, 6), (4, 0), (0, 0)):
        answer = new_choice_group()
        usage = Usage(
            prompt_tokens=3, generated_tokens=9, draft_tokens=drafts, accepted_tokens=accepted
        )
        answer.on_report(answer.choices[0], Accepted(request=0))
        answer.on_report(answer.choices[0], Output(request=0, tokens=[72], usage=usage))
        context = RequestContext(
            method="POST", path="/v1/x", route="/v1/x", on_close=[metrics.count]
        )
        context.timeline = answer.timeline
        context.group = answer
        context.close(200)
    text = metrics.text().decode()
    assert "tidegate_draft_acceptance_count 2.0" in text
    assert "tidegate_draft_acceptance_sum 0.75" in text
    assert 'tidegate_draft_acceptance_bucket{le="0.0"} 1.0' in text
    assert 'tidegate_draft_acceptance_bucket{le="0.7"} 1.0' in text
