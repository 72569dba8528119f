"""A gateway with scripted prefill and decode engines, and requests to it from threads."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import requests

from protocol.engine.messages import Generate
from protocol.wire.errors import ErrorInfo
from tests.support.gateway_process import GatewayProcess
from tests.support.http import metric_of
from tests.support.scripted_engine import Reply, Script, ScriptedEngine, TokenReply, text_reply
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
PROMPT = "a prompt that is worth it, and more than that, since all of it is long"
SHORT = "short"
NEVER = TokenReply([[]] * 20_000)
TEXT = "The quick brown fox jumps over the lazy dog."


def continued(generate: Generate) -> Reply:
    """Reply with TEXT from the token after those that another engine has sent."""
    start = 0 if generate.answer is None else len(generate.answer)
    return text_reply(TEXT[start:])


def without_handle(generate: Generate) -> Reply:
    """Refuse a handle."""
    error = ErrorInfo(code="invalid_request", message="?", param="kv_transfer_params")
    return error if generate.kv_handle else text_reply("Hello")


def stuck_after(count: int) -> Script:
    """Return a script that sends the first `count` tokens of TEXT, and then nothing more."""
    steps = [[byte] for byte in TEXT[:count].encode()]
    return lambda generate: TokenReply([*steps, *[[]] * 100_000])


class EnginePair:
    """Prefill engines (`p`) and decode engines (`d`), two of each by default, and their gateway."""

    def __init__(self, folder: Path, *, num_p: int = 2, num_d: int = 2, **config: Any) -> None:
        def engines(role: str, count: int) -> list[ScriptedEngine]:
            return [ScriptedEngine(f"ipc://{folder}/{role}{number}") for number in range(count)]

        self.p, self.d = engines("p", num_p), engines("d", num_d)
        self.gateway = GatewayProcess(
            prefill=[engine.address for engine in self.p],
            decode=[engine.address for engine in self.d],
            split_min_tokens=16,
            **config,
        )

    def complete(self, prompt: str | list[str] = PROMPT, **fields: Any) -> requests.Response:
        return self.gateway.post(COMPLETIONS, {"prompt": prompt, **fields})

    def asked(self, engines: list[ScriptedEngine]) -> list[Generate]:
        return [generate for engine in engines for generate in engine.generates]

    def metric(self, line: str) -> float:
        return metric_of(self.gateway.url, line)

    def forget(self) -> None:
        for engine in (*self.p, *self.d):
            for received in (engine.generates, engine.kept, engine.released):
                received.clear()
            engine.aborts.clear()
            engine.abort_reasons.clear()


class PairRequest:
    """A request that a thread sends during the `with` block. `response` is set after the block."""

    def __init__(self, pair: EnginePair, **fields: Any) -> None:
        self.response: requests.Response
        self._thread = threading.Thread(target=self._ask, args=(pair, fields))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join()

    def _ask(self, pair: EnginePair, fields: dict[str, Any]) -> None:
        self.response = pair.complete(**fields)


def started(pair: EnginePair, stack: ExitStack, *, unstarted: int = 0) -> EnginePair:
    """Start the engines and the gateway, and wait until all are ready but `unstarted` engines."""
    parts: list[ScriptedEngine | GatewayProcess] = [*pair.p, *pair.d, pair.gateway]
    for engine in parts:
        stack.enter_context(engine)
    pair.gateway.await_ready()
    assert eventually(lambda: sum(not state["ready"] for state in states(pair)) == unstarted)
    return pair


def states(pair: EnginePair) -> list[dict[str, Any]]:
    facts = requests.get(pair.gateway.url + "/readyz", timeout=5).json()
    return [*facts["prefill"], *facts["decode"]]


def names(engines: list[ScriptedEngine]) -> list[str]:
    """Return the names of the requests that the engines have received."""
    return [label for engine in engines for each in engine.generates for label in each.labels]


def owner_and_other(engines: list[ScriptedEngine]) -> tuple[ScriptedEngine, ScriptedEngine]:
    """Wait until one of two engines has a request. Return this engine, and the other one."""
    assert eventually(lambda: any(engine.generates for engine in engines))
    first, second = engines
    return (first, second) if first.generates else (second, first)
