"""A split server with two prefill and two decode engines, as processes with a tiny model: where
prompts go, and what happens to the requests of an engine that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.http import metric_of
from tests.support.split_cluster import SplitCluster
from tests.support.streams import StreamedAnswer, run_all, varied_requests
from tests.support.tiny_checkpoint import FITTING, write_babbling_llama
from tests.support.waiting import eventually
from tests.torture.failover import differences, num_moved, stream_with_fault

pytestmark = pytest.mark.long

GENERATE = "/inference/v1/generate"
BLOCK_TOKENS = 16
STREAMS = varied_requests(16, 5, max_tokens=60)
TRIES = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_babbling_llama(tmp_path_factory.mktemp("babbling"), **FITTING)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[SplitCluster]:
    with SplitCluster(
        tmp_path_factory.mktemp("split") / "run", checkpoint, token_budget=256
    ) as server:
        yield server


@pytest.fixture(scope="module")
def alone(split: SplitCluster) -> list[StreamedAnswer]:
    """Return the undisturbed answers to STREAMS."""
    answers = run_all(split.url, STREAMS, at_once=1)
    assert not [answer.error for answer in answers if answer.error]
    return answers


def ask(server: SplitCluster, prompt: list[int], *, salt: str = "s") -> list[int]:
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
    response = requests.post(server.url + GENERATE, json=body, timeout=120)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def test_prompts_with_a_common_prefix_are_computed_where_it_is_cached(split: SplitCluster) -> None:
    def routed(reason: str) -> float:
        return metric_of(split.url, f'tidegate_routed_requests_total{{reason="{reason}"}}')

    def computed() -> int:
        return sum(p.stats().num_computed_tokens for p in split.p)

    size, groups, rounds = 8 * BLOCK_TOKENS, 4, 5
    prefixes = [[1000 * group + place for place in range(size)] for group in range(1, groups + 1)]
    before, by_prefix, by_load = computed(), routed("prefix"), routed("load")
    for number in range(rounds):
        for prefix in prefixes:
            ask(split, [*prefix, 7, 8, 9, number])
    # A prefill engine computes all tokens of a prompt but the last one.
    assert computed() - before == groups * (size + 3) + groups * (rounds - 1) * 3
    assert routed("prefix") - by_prefix == groups * (rounds - 1)
    assert routed("load") - by_load == groups


@pytest.mark.parametrize("only_worker", [False, True])
def test_the_streams_of_a_killed_decode_engine_end_as_they_would_have_alone(
    split: SplitCluster, alone: list[StreamedAnswer], only_worker: bool
) -> None:
    """On a busy machine, the engine may have no streams left when it is killed. Then it is killed
    once more, with others."""
    num_tokens = sum(answer.num_tokens for answer in alone)
    lost = split.d[only_worker]
    for _ in range(TRIES):
        before = num_moved(split.url)
        answers = stream_with_fault(
            split.url, STREAMS, num_tokens // 4, lambda: lost.kill(only_worker=only_worker)
        )
        moved = num_moved(split.url) - before
        lost.restart()
        split.wait_until_ready()
        assert differences(STREAMS, alone, answers) == []
        if moved:
            return
    pytest.fail("nothing was moved")


def test_prompts_of_a_killed_prefill_engine_are_computed_by_the_other_one(
    split: SplitCluster,
) -> None:
    prompts = [[first, *(3 + place % 900 for place in range(1500))] for first in range(24)]
    alone = [ask(split, prompt, salt="alone") for prompt in prompts]
    moved = 'tidegate_moved_requests_total{cause="lost"}'
    computed_by_d = 'tidegate_handover_fallbacks_total{cause="lost"}'
    before = metric_of(split.url, moved)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, split, prompt) for prompt in prompts]
        killed = split.p[0]
        assert eventually(lambda: killed.stats().waiting, every_s=0.005)
        killed.kill()
    killed.restart()
    split.wait_until_ready()
    assert [answer.result() for answer in answers] == alone
    assert metric_of(split.url, moved) > before, "nothing was moved"
    assert metric_of(split.url, computed_by_d) == 0, "a decode engine computed a prompt"


def test_nothing_is_left_behind(split: SplitCluster) -> None:
    assert eventually(
        lambda: all(
            (s.running, s.waiting, s.fetching, s.leases) == (0, 0, 0, 0)
            for s in [engine.stats() for engine in (*split.p, *split.d)]
        )
    )
