"""Sends many small requests of all APIs over kept-alive connections: streams, whole answers, bodies
that are refused, and streams that the client leaves.

The status of each request is checked, and each answer is read to its end unless the client leaves.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from socket import socket
from typing import Any

from tests.support.http import connect, read_body, read_head, send_post
from tests.support.tiny_checkpoint import VOCAB

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, TOKENS, TOKENIZE = "/v1/responses", "/inference/v1/generate", "/tokenize"
NAME = "tiny"
"""The model's name. The server must serve the model under it."""
FINISHED, REFUSED, LEFT = "finished", "refused", "left"
"""The ends of a request, as its client sees them."""


@dataclass(frozen=True, slots=True)
class SmallRequest:
    """A request. If `is_bad`, it must be refused. If `leaves`, its client hangs up before the
    answer is complete."""

    path: str
    body: Mapping[str, Any]
    is_bad: bool = False
    leaves: bool = False


def random_requests(dice: random.Random) -> Iterator[SmallRequest]:
    """Yield random requests without end."""
    while True:
        path = dice.choice((CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOKENS, TOKENIZE))
        body = _body(path, dice)
        what = dice.random()
        if what < 0.05:
            yield SmallRequest(path, _spoiled(path, body, dice), is_bad=True)
        elif what < 0.10 and path != TOKENIZE:
            long = _body(path, dice, max_tokens=400)
            yield SmallRequest(path, {**long, "stream": dice.random() < 0.7}, leaves=True)
        else:
            yield SmallRequest(path, body)


def _body(path: str, dice: random.Random, max_tokens: int = 0) -> dict[str, Any]:
    max_tokens = max_tokens or dice.randrange(1, 8)
    ids = [dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 40))]
    words = " ".join(f"w{number}" for number in ids)
    messages = [{"role": "user", "content": words}]
    if path == TOKENIZE:
        return {"prompt": words}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages, "max_tokens": max_tokens},
        COMPLETIONS: {"prompt": words, "max_tokens": max_tokens},
        MESSAGES: {"messages": messages, "max_tokens": max_tokens, "model": NAME},
        RESPONSES: {"input": words, "max_output_tokens": max_tokens, "store": False},
        TOKENS: {"token_ids": ids, "sampling_params": {"max_tokens": max_tokens}},
    }
    return {**bodies[path], "stream": dice.random() < 0.5}


def _spoiled(path: str, body: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Return a body that is refused: all fields are missing, or one has a wrong type."""
    first = next(iter(body))
    return dice.choice([{}, {**body, first: 7}, {**body, first: None}, {**body, "model": 3}])


class SmallClient:
    """One connection, which is kept open unless the server or a request closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket | None = None
        self._file: Any = None

    def close(self) -> None:
        if self._socket is not None:
            self._file.close()
            self._socket.close()
        self._socket = None

    def ask(self, request: SmallRequest) -> str:
        """Send one request, and return how it ended. Raises AssertionError if its status was not
        expected."""
        if self._socket is None:
            self._socket = connect(self._port)
            self._file = self._socket.makefile("rb")
        send_post(self._socket, request.path, request.body)
        if request.leaves and not request.body["stream"]:
            self.close()
            return LEFT
        status, headers = read_head(self._file)
        if request.leaves and status == HTTPStatus.OK:
            self._file.readline()
            self.close()
            return LEFT
        body = read_body(self._file, headers)
        if headers.get("connection", "").lower() == "close":
            self.close()
        wanted = (400, 404, 422) if request.is_bad else (200,)
        assert status in wanted, f"{status} for {request}: {body!r}"
        return REFUSED if request.is_bad else FINISHED


class SmallLoad:
    """Sends a number of requests from several clients. `wrong` lists the errors of requests that
    did not end as expected."""

    def __init__(self, port: int, num_requests: int, num_clients: int) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._port = port
        self._left = num_requests
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._client, args=(seed,)) for seed in range(num_clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _client(self, seed: int) -> None:
        stream = random_requests(random.Random(seed))
        with closing(SmallClient(self._port)) as client:
            while self._takes_one():
                try:
                    end = client.ask(next(stream))
                except Exception as error:  # noted as wrong; the other requests continue
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    client.close()
                    end = "wrong"
                with self._lock:
                    self.ends[end] += 1

    def _takes_one(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0
