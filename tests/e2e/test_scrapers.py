"""The metrics of a server with the real model that endpoint pickers and autoscalers read."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from protocol.engine.stats import EngineStats
from tests.support.engine_view import EngineView
from tests.support.http import connect, send_post
from tests.support.server import SERVED_NAME, Server
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

PICKED = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
)
"""The names that the endpoint picker of the Gateway API's inference extension reads."""


def scrape(url: str) -> Mapping[str, Sample]:
    """Return the first sample of each metric, as an endpoint picker does. It must be the only one
    of the metrics in PICKED."""
    reply = requests.get(url + "/metrics", timeout=5)
    families = {each.name: each.samples for each in text_string_to_metric_families(reply.text)}
    for name in PICKED:
        assert len(families[name]) == 1, name
    return {name: samples[0] for name, samples in families.items() if samples}


def stats_of(server: Server) -> EngineStats:
    view = EngineView(server.address)
    try:
        return view.stats()
    finally:
        view.close()


def test_a_picker_finds_the_load_and_the_kv_cache(exact_server: Server) -> None:
    stats = stats_of(exact_server)
    picked = scrape(exact_server.url)
    assert all(picked[name].labels["model_name"] == SERVED_NAME for name in PICKED)
    facts = picked["vllm:cache_config_info"]
    assert facts.value == 1
    assert int(facts.labels["num_gpu_blocks"]) == stats.total_blocks + 1  # and the null block
    assert int(facts.labels["block_size"]) > 0
    adapters = picked["vllm:lora_requests_info"].labels
    assert adapters["running_lora_adapters"] == adapters["waiting_lora_adapters"] == ""
    assert int(adapters["max_lora"]) == 0


def test_a_picker_sees_a_running_answer_come_and_go(exact_server: Server) -> None:
    def is_busy() -> bool:
        picked = scrape(exact_server.url)
        usage = picked["vllm:kv_cache_usage_perc"].value
        return picked["vllm:num_requests_running"].value >= 1 and 0 < usage <= 1

    body = {"prompt": "Once upon a time", "stream": True, "max_tokens": 1500, "ignore_eos": True}
    with connect(exact_server.port) as client:
        send_post(client, "/v1/completions", body)
        assert eventually(is_busy, every_s=0.1)
    assert eventually(lambda: scrape(exact_server.url)["vllm:num_requests_running"].value == 0)
