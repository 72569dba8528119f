"""`tidegate serve --split`, and the same over TCP with `tidegate engine`, with the real model."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from protocol.engine.stats import EngineStats
from tests.support.cluster import Cluster
from tests.support.engine_view import EngineView
from tests.support.http import connect, events_of, metric_of, send_post
from tests.support.reference import GOLDEN
from tests.support.server import Server
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

GENERATE = "/inference/v1/generate"
NUM_REQUESTS, MOST_TOKENS, SHORT_PROMPT = 100, 5, 20
TIE = 1e-3
"""If the two best logits differ by less, the order of sums in a batch may decide between them."""
EXACT = ("--dtype", "float32", "--max-len", "1024")
LONG_PROMPT, LONG_ANSWER = 700, 300


@pytest.fixture(scope="module")
def split() -> Iterator[Server]:
    """Yield a server with few slots, with drafts, and without a prefix cache. So the engines
    compute all tokens, and the test can count them."""
    slots = ("--max-slots", "2", "--speculation", "ngram", "--no-prefix-cache")
    with Server("--split", "--split-min-tokens", "2", *slots, *EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), "--max-slots", "4", *EXACT) as running:
        yield running


@contextmanager
def viewed(*views: EngineView) -> Iterator[tuple[EngineView, ...]]:
    try:
        yield views
    finally:
        for view in views:
            view.close()


def body_of(prompt: list[int], max_tokens: int, *, stream: bool = False) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"token_ids": prompt, "sampling_params": sampling, "stream": stream}


def ask(url: str, prompt: list[int], max_tokens: int, *, stream: bool = False) -> list[int]:
    """Return the tokens of the answer, whole or joined from a stream."""
    body = body_of(prompt, max_tokens, stream=stream)
    response = requests.post(url + GENERATE, json=body, timeout=120)
    assert response.status_code == 200, response.text
    if not stream:
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids
    parts = [part["choices"][0] for part in events_of(response.content)]
    assert parts[-1]["finish_reason"] == "length"
    return [token for part in parts for token in part["token_ids"]]


def check(row: dict[str, Any], answer: list[int], count: int) -> None:
    """Check that a greedy answer equals the reference up to the first tie."""
    assert len(answer) == count
    for at, token in enumerate(answer):
        if token != row["tokens"][at]:
            assert row["gaps"][at] <= TIE, f"token {at} of {row['prompt'][:8]} is {token}"
            return


def states(url: str) -> dict[str, list[dict[str, Any]]]:
    facts: dict[str, list[dict[str, Any]]] = requests.get(url + "/readyz", timeout=5).json()
    return facts


@pytest.mark.timeout(400)
def test_a_hundred_answers_are_those_of_one_engine_and_nothing_is_computed_twice(
    split: Server,
) -> None:
    rows = json.loads(GOLDEN.read_text())
    short = [row for row in rows if len(row["prompt"]) <= SHORT_PROMPT]
    draw = random.Random(3)
    more = [draw.choice(short) for _ in range(NUM_REQUESTS - len(rows))]
    asked = [(row, draw.randint(1, MOST_TOKENS)) for row in [*rows, *more]]
    draw.shuffle(asked)
    with (
        viewed(
            EngineView(split.address), EngineView(split.address.replace("engine.", "prefill."))
        ) as (d, p),
        ThreadPoolExecutor(12) as pool,
    ):
        answers = list(
            pool.map(
                lambda number: ask(
                    split.url, asked[number][0]["prompt"], asked[number][1], stream=number % 2 > 0
                ),
                range(NUM_REQUESTS),
            )
        )
        for (row, count), answer in zip(asked, answers, strict=True):
            check(row, answer, count)
        check_counts(p.stats(), d.stats(), [(len(row["prompt"]), n) for row, n in asked])
        for view in (p, d):
            view.wait_until_free()
    num_handed = sum(len(row["prompt"]) > 1 for row, _ in asked)
    assert metric_of(split.url, "tidegate_handovers_total") == num_handed


def check_counts(p: EngineStats, d: EngineStats, asked: list[tuple[int, int]]) -> None:
    """Check that both engines together compute each prompt token once, each answer token but the
    last once, and each wrong draft."""
    assert d.num_fetches_failed == {}
    handed = [length for length, _ in asked if length > 1]
    assert p.num_computed_tokens == sum(length - 1 for length in handed)
    assert d.num_fetched_tokens == p.num_computed_tokens
    wrong = d.num_draft_tokens - d.num_accepted_tokens
    answers = sum(count for _, count in asked)
    assert (d.num_preemptions, d.num_generated_tokens) == (0, answers)
    assert d.num_computed_tokens == answers + wrong
    assert d.num_draft_tokens > 0, "nothing was speculated"
    assert p.num_leases_ended.keys() <= {"taken", "released"}
    assert sum(p.num_leases_ended.values()) == len(handed)


def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(cluster: Cluster) -> None:
    """Clients leave while P computes, while D waits, and while D streams."""
    prompt = [5 + number % 900 for number in range(LONG_PROMPT)]
    with viewed(cluster.p.view(), cluster.d.view()) as (p, d):
        reply = 0
        moments = {
            "P computes": lambda: p.stats().running,
            "P keeps, or D has it": lambda: p.stats().leases or d.stats().running,
            "D answers": lambda: d.stats().num_generated_tokens > reply,
        }
        for number, (moment, has_come) in enumerate(moments.items()):
            reply = d.stats().num_generated_tokens
            with connect(cluster.port) as sock:
                body = body_of([100 + number, *prompt], LONG_ANSWER, stream=True)
                send_post(sock, GENERATE, body)
                assert eventually(has_come), moment
            for view in (p, d):
                view.wait_until_free()


def test_a_killed_engine_is_reported_and_the_split_continues_without_p(cluster: Cluster) -> None:
    """P is killed while it computes, and is started again. Then D is killed."""
    rows = [row for row in json.loads(GOLDEN.read_text()) if len(row["prompt"]) > 30][:4]
    waits = [5 + number % 900 for number in range(LONG_PROMPT)]
    with ThreadPoolExecutor(6) as pool, viewed(cluster.p.view()) as (p,):
        long = [pool.submit(ask, cluster.url, [n, *waits], 2, stream=n > 200) for n in (200, 201)]
        assert eventually(lambda: p.stats().running)
        os.kill(cluster.p.engine_pid, signal.SIGKILL)
        answers = [pool.submit(ask, cluster.url, row["prompt"], MOST_TOKENS) for row in rows]
        for row, answer in zip(rows, answers, strict=True):
            check(row, answer.result(), MOST_TOKENS)
        assert [len(answer.result()) for answer in long] == [2, 2]
    assert cluster.p.end() == 128 + signal.SIGKILL
    assert "engine was killed by SIGKILL" in cluster.p.output
    assert eventually(lambda: not states(cluster.url)["prefill"][0]["ready"])
    assert requests.get(cluster.url + "/readyz", timeout=5).status_code == 200
    assert metric_of(cluster.url, 'tidegate_handover_fallbacks_total{cause="lost"}') >= 1

    with cluster.engine("prefill", cluster.p.address) as back:
        back.await_ready()
        assert eventually(lambda: states(cluster.url)["prefill"][0]["ready"])
        before = metric_of(cluster.url, "tidegate_handovers_total")
        check(rows[0], ask(cluster.url, rows[0]["prompt"], MOST_TOKENS), MOST_TOKENS)
        assert metric_of(cluster.url, "tidegate_handovers_total") == before + 1

        failed: list[requests.Response] = []
        body = body_of([9, *waits[:20]], LONG_ANSWER)
        asking = threading.Thread(
            target=lambda: failed.append(requests.post(cluster.url + GENERATE, json=body))
        )
        asking.start()
        with viewed(cluster.d.view(), back.view()) as (d, p):
            assert eventually(lambda: d.stats().running)
            os.kill(cluster.d.engine_pid, signal.SIGKILL)
            asking.join()
            assert failed[0].json()["error"]["code"] == "engine_lost"
            p.wait_until_free()
        assert eventually(
            lambda: requests.get(cluster.url + "/readyz", timeout=5).status_code == 503
        )
