"""Observers of a server under torture: one polls its health, one has a stream open."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any, Self

import requests

POLL_EVERY_S = 0.05
PATIENCE_S = 1.0
"""A server that does not answer /readyz within this time is not ready."""


class ReadinessObserver:
    """Polls /readyz during the `with` block.

    answers          (time, ready, reason or engine's state) of each poll
    num_at_prefill   number of requests that the prefill engine computes; None: there is no prefill
                     engine, or no poll has been answered yet
    """

    def __init__(self, url: str) -> None:
        self._url = url + "/readyz"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[tuple[float, bool, str]] = []
        self.num_at_prefill: int | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def is_ready(self) -> bool:
        return bool(self.answers) and self.answers[-1][1]

    def sees_chunk(self) -> bool:
        """Return whether a prompt is being computed. At a prefill engine, any request counts. If
        there is none, only chunks between the first and the last chunk of a prompt count."""
        if self.num_at_prefill is not None:
            return self.num_at_prefill > 0
        words = self.answers[-1][2] if self.answers else ""
        if "chunk" not in words:
            return False
        number, _, count = words.rpartition("chunk ")[2].partition(" of ")
        return 1 < int(number) < int(count)

    def unready_since(self, moment: float) -> tuple[float | None, str]:
        """Return (seconds from `moment` until the server was not ready, reason); (None, "") if it
        stayed ready."""
        for when, is_ready, why in list(self.answers):
            if when > moment and not is_ready:
                return when - moment, why
        return None, ""

    def _run(self) -> None:
        while not self._is_over.wait(POLL_EVERY_S):
            try:
                facts = requests.get(self._url, timeout=PATIENCE_S).json()
            except (requests.RequestException, ValueError) as error:
                self.answers.append((time.monotonic(), False, f"no answer: {type(error).__name__}"))
                continue
            if "prefill" in facts:
                self.num_at_prefill = facts["prefill"][0]["running"] or 0
            words = str(facts["why"] or facts["engine"]["doing"])
            self.answers.append((time.monotonic(), facts["ready"], words))


class TortureClient:
    """One streamed answer.

    end        "finished", "error: ...", "error STATUS: ..." or "broken: ..."; "" while the stream
               is open. A stream without [DONE] is broken, even after an error event
    ended_at   the time of the end
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._thread: threading.Thread | None = None
        self._response: requests.Response | None = None
        self._num_events = 0
        self.end = ""
        self.ended_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            if self._response is not None and not self.end:
                with contextlib.suppress(Exception):  # the stream may be in any state
                    self._response.close()
            self._thread.join(30)

    def ask(self, num_words: int, max_tokens: int) -> None:
        prompt = " ".join(f"w{number % 90 + 3}" for number in range(num_words))
        self.stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})

    def stream(self, path: str, body: dict[str, Any]) -> None:
        """Start a thread that requests and reads a stream. EOS is ignored, so the answer has all
        `max_tokens` tokens of `body`."""
        whole = {**body, "ignore_eos": True, "stream": True}
        self._thread = threading.Thread(target=self._run, args=(path, whole))
        self._thread.start()

    def has_begun(self) -> bool:
        return self._num_events > 2

    def _run(self, path: str, body: dict[str, Any]) -> None:
        try:
            end = self._read(path, body)
        except (requests.RequestException, OSError) as error:
            end = f"broken: {type(error).__name__}"
        self.ended_at = time.monotonic()
        self.end = end

    def _read(self, path: str, body: dict[str, Any]) -> str:
        end, is_done = "finished", False
        with requests.post(self._url + path, json=body, stream=True, timeout=60) as response:
            self._response = response
            if not response.ok:
                return f"error {response.status_code}: {response.json()['error']['message']}"
            for line in response.iter_lines():
                self._num_events += 1
                is_done = is_done or line == b"data: [DONE]"
                if line.startswith(b'data: {"error"'):
                    end = f"error: {json.loads(line.removeprefix(b'data: '))['error']['message']}"
        return end if is_done else f"broken: no [DONE] ({end})"
