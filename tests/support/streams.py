"""Streamed answers of all kinds, folded into values that two servers can be compared by."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

from tests.support.waiting import HANG_S

CHAT = "/v1/chat/completions"
WORDS = [
    "the",
    "a",
    "of",
    "one",
    "sky",
    "sea",
    "stone",
    "bread",
    "river",
    "names",
    "what",
    "why",
    "count",
    "list",
    "tell",
    "me",
    "and",
    "then",
]


@dataclass(slots=True)
class StreamedAnswer:
    """One stream, as its client received it."""

    #: Token ids of each choice.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    #: Text of each choice and field: (0, "content"), (0, "reasoning_content").
    texts: dict[tuple[int, str], str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    #: (token, logprob rounded) of each choice.
    logprobs: dict[int, list[tuple[Any, float]]] = field(default_factory=dict)
    completion_tokens: int = 0
    error: str = ""

    def add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
            return
        if event.get("usage"):
            self.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice.get("token_ids") or [])
            for name, value in (choice.get("delta") or {}).items():
                if isinstance(value, str) and name != "role":
                    key = index, name
                    self.texts[key] = self.texts.get(key, "") + value
            if choice.get("finish_reason"):
                self.finish[index] = choice["finish_reason"]
            found = choice.get("logprobs") or {}
            rows = found.get("content") or []
            pairs = [(row.get("token"), round(row["logprob"], 4)) for row in rows]
            self.logprobs.setdefault(index, []).extend(pairs)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))


@dataclass(frozen=True, slots=True)
class StreamRequest:
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def run(self, url: str, on_token: Callable[[int], None] = lambda count: None) -> StreamedAnswer:
        """Return the answer of the server at `url`. `on_token` is called with the number of tokens
        of each event."""
        answer = StreamedAnswer()
        body = {**self.body, "stream": True, "stream_options": {"include_usage": True}}
        with requests.post(
            url + self.path, json=body, headers=self.headers, stream=True, timeout=HANG_S
        ) as response:
            if not response.ok:
                answer.error = f"{response.status_code} {response.text}"
                return answer
            for event in _events(response.iter_lines()):
                before = answer.num_tokens
                answer.add(event)
                on_token(answer.num_tokens - before)
        return answer


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    ended = False
    for line in lines:
        if line.startswith(b"data: "):
            assert not ended, "an event after the end"
            if line == b"data: [DONE]":
                ended = True
            else:
                yield json.loads(line.removeprefix(b"data: "))
    assert ended, "the stream was cut off"


def varied_requests(count: int, seed: int, *, max_tokens: int = 120) -> list[StreamRequest]:
    """Return requests that use all that an answer may depend on: greedy and drawn tokens, filters,
    penalties, logprobs, grammars, stop strings, several choices and shared prefixes."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        words = " ".join(dice.choices(WORDS, k=dice.randrange(3, 60)))
        body: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": f"Group {number % 4}. " + "Answer at length. " * 8},
                {"role": "user", "content": words},
            ],
            "max_tokens": max_tokens,
            "return_token_ids": True,
        }
        kind = number % 8
        if kind != 0:
            body |= {"temperature": 0.9, "seed": dice.randrange(1 << 40)}
        extra: list[dict[str, Any]] = [
            {"temperature": 0},
            {},
            {"top_p": 0.8, "top_k": 40, "min_p": 0.01},
            {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
            {"logprobs": True, "top_logprobs": 2},
            {"response_format": {"type": "json_object"}},
            {"stop": ["qq", "zx"], "logit_bias": {"17": 3}},
            {"n": 2},
        ]
        made.append(StreamRequest(CHAT, body | extra[kind]))
    return made


def run_all(
    url: str,
    asked: Sequence[StreamRequest],
    on_token: Callable[[int], None] = lambda count: None,
    *,
    at_once: int = 64,
) -> list[StreamedAnswer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda each: each.run(url, on_token), asked))
