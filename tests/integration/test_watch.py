"""The stream of measurements: its frames, who may read it, and what it costs while no one does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests

from protocol.shared.api_keys import KeyEntry, digest_of
from protocol.shared.watch import WatchFrame
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, error_of, read_body, read_head
from tests.support.paced_server import paced_server
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import eventually
from tools.commands.keys import with_key, write

WATCH, GENERATE = "/v1/watch", "/inference/v1/generate"


@contextmanager
def watched(gateway: GatewayProcess, query: str = "") -> Iterator[Iterator[WatchFrame]]:
    """Open a stream, and yield its frames as they come."""
    with requests.get(gateway.url + WATCH + query, stream=True, timeout=20) as response:
        assert response.status_code == 200, response.text
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield frames_of(response)


def frames_of(response: requests.Response) -> Iterator[WatchFrame]:
    for line in response.iter_lines(1 << 20):
        if line.startswith(b"data: "):
            yield msgspec.json.decode(line.removeprefix(b"data: "), type=WatchFrame)


def test_frames_show_running_requests_steps_and_rates() -> None:
    with (
        paced_server("llama-3.1-8b", "L40S", max_len=4096, max_slots=2) as gateway,
        ThreadPoolExecutor(3) as pool,
        watched(gateway) as frames,
    ):
        first = next(frames)
        (engine,) = first.engines
        assert engine.limits is not None
        assert (engine.stats.running, engine.limits.max_slots, engine.num_open) == (0, 2, 0)
        blocks = engine.blocks
        assert blocks.requests + blocks.leased + blocks.cached + blocks.free == (
            engine.stats.total_blocks
        )
        params = {"max_tokens": 150, "ignore_eos": True, "seed": 1}
        body = {"token_ids": [*range(2000)], "sampling_params": params}
        answers = [pool.submit(gateway.post, GENERATE, body) for _ in range(3)]
        seen: list[Any] = []
        for frame in frames:
            seen += frame.engines
            if all(answer.done() for answer in answers) and not frame.engines[0].num_open:
                break
        assert [answer.result().status_code for answer in answers] == [200] * 3
    assert {each.error for each in seen} == {""}
    assert max(each.stats.running for each in seen) == 2
    assert max(each.rates.tokens_per_s for each in seen) > 1
    assert {row.waits_for for each in seen for row in each.requests} >= {"step", "slot"}
    assert max(each.blocks.requests for each in seen) > 100
    assert seen[-1].blocks.cached > 100, "the prompts stay in the prefix cache"
    steps = [step for each in seen for step in each.steps]
    numbers = [(step.first, step.first + step.count) for step in steps]
    assert numbers[0][0] == 1
    assert all(a[1] == b[0] for a, b in pairwise(numbers)), "no step is missing or twice"
    computed = seen[-1].stats.num_computed_tokens
    assert sum(step.prefill + step.decode for step in steps) == computed
    assert sum(step.prefill for step in steps) >= 2000
    assert any(each.gap is not None and each.first_token is not None for each in seen)


def test_the_first_frame_has_what_was_before_it() -> None:
    params = {"max_tokens": 60, "ignore_eos": True}
    body = {"token_ids": [*range(40)], "sampling_params": params}
    with paced_server("llama-3.1-8b", "L40S", max_len=4096, max_slots=2) as gateway:
        assert gateway.post(GENERATE, body).status_code == 200
        for _ in range(2):  # nobody has watched before the first time
            with watched(gateway) as frames, watched(gateway) as others:
                for stream in (frames, others):
                    (engine,) = next(stream).engines
                    assert sum(point.tokens_per_s for point in engine.past) >= 58
                    assert engine.past[-1].gap is not None
                    assert sum(step.decode for step in engine.steps) >= 58
                (engine,) = next(others).engines
                assert (engine.past, engine.steps) == ([], [])


def test_all_watchers_get_the_same_frames_of_one_poll(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    with watched(gateway) as first, watched(gateway) as second:
        since, before = next(second).at, engine.num_polls
        theirs = [next(second).at for _ in range(6)]
        num_polls = engine.num_polls - before
        until = max(theirs[-1], time.time())
        ours = [next(first).at]
        while ours[-1] <= until:
            ours.append(next(first).at)
        ours = [at for at in ours if at > since]
        assert ours[: len(theirs)] == theirs
        # The last poll may not have been answered, and one frame was sent after `until`.
        assert num_polls <= len(ours)


def test_no_engine_is_polled_while_no_one_watches(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    with watched(gateway) as frames:
        next(frames)
    url = gateway.url + "/v1/models"
    assert eventually(lambda: not _polls_within_some_steps(engine, url))


def _polls_within_some_steps(engine: ScriptedEngine, url: str) -> int:
    """Return how many polls come while the gateway sends several heartbeats."""
    before, pings = engine.num_polls, engine.num_pings
    assert eventually(lambda: engine.num_pings >= pings + 5)
    requests.get(url, timeout=20)
    return engine.num_polls - before


def test_a_stream_ends_after_the_requested_number_of_frames(gateway: GatewayProcess) -> None:
    with watched(gateway, "?frames=2") as frames:
        assert len(list(frames)) == 2


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "", "99999999999"])
def test_a_bad_number_of_frames_is_refused(gateway: GatewayProcess, text: str) -> None:
    reply = requests.get(f"{gateway.url}{WATCH}?frames={text}", timeout=20)
    assert error_of(reply, 400)["param"] == "frames"


def test_only_an_admin_may_watch(engine: ScriptedEngine, tmp_path: Path) -> None:
    entry = KeyEntry(digest=digest_of(f"tg-{'alice':x<43}"))
    write(tmp_path / "keys.toml", with_key("", "alice", entry))
    with GatewayProcess(engine=engine.address, api_keys=str(tmp_path / "keys.toml")) as gateway:
        url = gateway.await_ready().url + WATCH
        key = {"Authorization": f"Bearer tg-{'alice':x<43}"}
        assert requests.get(url, timeout=20).status_code == 401
        refused = requests.get(url, headers=key, timeout=20)
    assert "'admin'" in error_of(refused, 403)["message"]


def test_a_frame_says_that_an_engine_does_not_answer(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    with watched(gateway) as frames:
        assert next(frames).engines[0].error == ""
        engine.is_silent = True
        assert any(frame.engines[0].error for frame in frames)
        engine.is_silent = False
        assert any(not frame.engines[0].error for frame in frames)


def test_a_watcher_that_does_not_read_skips_frames(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """One frame with many long names fills the kernel's buffers."""
    usual = engine.stats
    names = {f"{i}{'x' * 1000}": i for i in range(6000)}
    engine.stats = msgspec.structs.replace(usual, num_finished=names)
    try:
        with watched(gateway) as frames:  # until no older state can be sent
            assert any(frame.engines[0].stats.num_finished == names for frame in frames)
        with connect(gateway.port, rcvbuf=4096) as slow, slow.makefile("rb") as file:
            slow.sendall(f"GET {WATCH}?frames=2 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            _, headers = read_head(file)
            with watched(gateway) as frames:
                sent = [next(frames)]
                engine.stats = usual
                sent += [next(frames) for _ in range(4)]
            data = [line[6:] for line in read_body(file, headers).split(b"\n") if line]
    finally:
        engine.stats = usual
    first, second = [msgspec.json.decode(line, type=WatchFrame) for line in data]
    assert first.at <= sent[0].at
    assert second.at > sent[-1].at, "it is as new as what others get, not a stored one"


def test_a_draining_gateway_ends_the_stream(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        with watched(gateway) as frames:
            next(frames)
            gateway.process.terminate()
            list(frames)
        assert gateway.wait() == 0


def test_a_timeline_and_the_watch_are_in_the_openapi_document(gateway: GatewayProcess) -> None:
    paths = requests.get(f"{gateway.url}/openapi.json", timeout=20).json()["paths"]
    assert "/v1/requests/{request_id}/timeline" in paths
    content = paths[WATCH]["get"]["responses"]["200"]["content"]
    assert "WatchFrame" in json.dumps(content["text/event-stream"])
