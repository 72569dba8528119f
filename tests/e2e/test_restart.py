"""`tidegate restart`: the engines of a server are replaced while it streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.support.commands import run_command
from tests.support.server import SERVED_NAME, Server
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.support.waiting import HANG_S, eventually

LONG_TOKENS = 16_000
"""More than the engines compute during the test."""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_roomy_llama(tmp_path_factory.mktemp("roomy"))
    options = ("--replicas", "2", "--drain-s", "0.5", "--served-name", SERVED_NAME)
    with Server(*options, model=str(model)) as running:
        yield running


class EndlessStream:
    """Reads a long answer in a thread, and counts its tokens."""

    def __init__(self, url: str, seed: int) -> None:
        body: dict[str, Any] = {
            "model": SERVED_NAME,
            "prompt": [5, 6, 7],
            "max_tokens": LONG_TOKENS,
            "ignore_eos": True,
            "temperature": 1,
            "seed": seed,
            "stream": True,
            "return_token_ids": True,
        }
        self.num_tokens = 0
        self.problems: list[str] = []
        self._is_closed = False
        url = f"{url}/v1/completions"
        self._response = requests.post(url, json=body, stream=True, timeout=HANG_S)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._response:
            for line in self._response.iter_lines():
                if self._is_closed:
                    return
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                (choice,) = event.get("choices") or [{}]
                if "error" in event or choice.get("finish_reason"):
                    self.problems.append(line.decode())
                self.num_tokens += len(choice.get("token_ids") or [])

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()


def test_streams_continue_while_all_engines_are_replaced(
    replicas: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    def epochs() -> set[str]:
        states = requests.get(f"{replicas.url}/readyz", timeout=HANG_S).json()["replicas"]
        return {state["epoch"] for state in states}

    before = epochs()
    streams = [EndlessStream(replicas.url, seed) for seed in range(3)]
    try:
        assert eventually(lambda: all(stream.num_tokens for stream in streams))
        restarted = run_command(capfd, "restart", "--port", str(replicas.port))
        assert restarted.code == 0, restarted.err
        assert restarted.out.splitlines() == [
            *(f"1/2  engine 1  {stage}" for stage in ("draining", "starting", "ready")),
            *(f"2/2  engine 2  {stage}" for stage in ("draining", "starting", "ready")),
            "all engines were restarted",
        ]
        assert not epochs() & before
        counts = [stream.num_tokens for stream in streams]
        assert eventually(
            lambda: all(s.num_tokens > n for s, n in zip(streams, counts, strict=True))
        )
    finally:
        for stream in streams:
            stream.close()
    assert [stream.problems for stream in streams] == [[], [], []]
