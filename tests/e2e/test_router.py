"""vllm-router in front of whole servers: it follows KV events, and divides prefill and decode."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from protocol.wire.cluster_key import write_cluster_key
from tests.support.examples import examples
from tests.support.fronts import VllmRouter, router_program
from tests.support.http import json_of, metric_of
from tests.support.ports import free_port
from tests.support.server import SERVED_NAME, Server
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

NUM_PROMPTS = examples(6, 60)
NUM_SERVED = "tidegate_engine_accepted_total"
OPTIONS = ("--served-name", SERVED_NAME, "--dtype", "float32")


def complete(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
    }
    answer: dict[str, Any] = json_of(
        requests.post(url + "/v1/completions", json={**body, **fields}, timeout=60)
    )
    return answer


def cached_tokens(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def prompts() -> list[str]:
    return [f"Story number {number} begins. " * 12 for number in range(NUM_PROMPTS)]


@pytest.mark.parametrize("replays", examples([True], [True, False]))
def test_the_router_sends_each_prompt_to_the_server_that_has_cached_it(
    babbling_model: str, *, replays: bool
) -> None:
    """Each prompt is computed first by one of the servers, without the router. The router learns
    this from a replay, or from events that arrive after it has started."""
    router_program()
    with ExitStack() as stack:
        servers, sources = [], []
        for _ in range(2):
            events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            options = ["--kv-events", events, "--kv-events-namespace", ""]
            options += ["--kv-events-replay", replay]
            server = Server(*OPTIONS, *options, model=babbling_model)
            servers.append(stack.enter_context(server))
            sources += ["--kv-event-source", f"{server.url}={events}"]
            sources += ["--kv-event-replay-source", f"{server.url}={replay}"] * replays
        urls = [server.url for server in servers]
        policy = ["--policy", "kv_aware", "--kv-event-model", SERVED_NAME]
        router = VllmRouter("--worker-urls", *urls, *policy, *sources)
        placed = [(urls[number % 2], prompt) for number, prompt in enumerate(prompts())]
        if replays:
            for url, prompt in placed:
                complete(url, prompt)
        front = stack.enter_context(router)

        def is_followed() -> bool:
            """Whether the router has received events of both servers."""
            probes = [f"Probe of {url}, round {metric_of(url, NUM_SERVED)}. " * 12 for url in urls]
            for url, probe in zip(urls, probes, strict=True):
                complete(url, probe)
            return all(cached_tokens(complete(front.url, probe)) for probe in probes)

        assert eventually(is_followed)
        if not replays:
            for url, prompt in placed:
                complete(url, prompt)
            assert eventually(lambda: cached_tokens(complete(front.url, placed[-1][1])))
        found = [cached_tokens(complete(front.url, prompt)) for _, prompt in placed]
        assert min(found) > 0, found


def test_the_router_lets_one_server_compute_prompts_and_another_answer(
    babbling_model: str, tmp_path: Path
) -> None:
    router_program()
    key = str(tmp_path / "cluster.key")
    write_cluster_key(key)
    with ExitStack() as stack:
        server = [Server(*OPTIONS, "--cluster-key", key, model=babbling_model) for _ in range(2)]
        prefill, decode = (stack.enter_context(each) for each in server)
        ways = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        front = stack.enter_context(
            VllmRouter(*ways, "--prefill", prefill.url, "--decode", decode.url)
        )
        for prompt in prompts():
            answer = complete(front.url, prompt)
            alone = complete(prefill.url, prompt)
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"]

        def is_counted() -> bool:
            """Whether the last heartbeats count all prompts."""
            fetched = metric_of(decode.url, "tidegate_engine_fetched_tokens_total")
            ended = metric_of(prefill.url, "tidegate_engine_leases_ended_total")
            return fetched > 32 * NUM_PROMPTS and ended == NUM_PROMPTS

        assert eventually(is_counted, every_s=0.2)
        assert metric_of(decode.url, "tidegate_engine_fetches_failed_total") == 0
