"""A prefill and a decode engine as processes, with real workers and a tiny model. Answers must be
right whatever happens to the prefill engine."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from protocol.engine.messages import Accepted, Generate, Output, Outputs, ReleaseKV
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from protocol.wire.cluster_key import write_cluster_key
from tests.support.engine_view import EngineView
from tests.support.processes import descendants_of, is_alive
from tests.support.raw_client import RawClient
from tests.support.tiny_checkpoint import VOCAB, write_tiny_llama
from tests.support.tiny_side import TinySide
from tests.support.waiting import eventually

LEASE_S = 4.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class SplitSide:
    """One of the two engines, and a client of it."""

    def __init__(self, directory: Path, checkpoint: Path, role: str) -> None:
        self.program = TinySide(
            directory,
            checkpoint,
            role,
            worker={"max_slots": 2, "kv_blocks": 65},
            kv_lease_s=LEASE_S,
            token_budget=64,
        )
        self.address = self.program.address
        self.client = RawClient(self.address)
        self._last = 0

    def ask(self, prompt: list[int], **asked: Any) -> int:
        self._last += 1
        message = Generate(request=self._last, prompt=Int32.of(prompt), params=GREEDY, **asked)
        self.client.send(message)
        assert self.client.receive() == Accepted(request=self._last)
        return self._last

    def receive_answer(self, number: int) -> Output:
        """Return the last output of the only open request, with the tokens of all its outputs."""
        tokens: list[int] = []
        while True:
            message = self.client.receive_kind(Outputs)
            assert isinstance(message, Outputs)
            for output in message.outputs:
                assert output.request == number
                tokens += output.tokens
                if output.finish is not None:
                    assert output.usage is not None
                    return Output(
                        request=number,
                        tokens=tokens,
                        finish=output.finish,
                        usage=output.usage,
                        kv_handle=output.kv_handle,
                    )

    def answer(self, prompt: list[int], **asked: Any) -> Output:
        return self.receive_answer(self.ask(prompt, **asked))

    def view(self) -> EngineView:
        return EngineView(self.address)


class SplitServer:
    def __init__(self, p: SplitSide, d: SplitSide) -> None:
        self.p, self.d = p, d

    def greet(self) -> None:
        for side in (self.p, self.d):
            side.program.await_ready()
            side.client.greet()

    def fetch_failures(self) -> dict[str, int]:
        with self.d.view() as view:
            return view.stats().num_fetches_failed

    def prefill(self, prompt: list[int]) -> str:
        return self.p.answer(prompt, kv_readers=1).kv_handle


@pytest.fixture
def split(tmp_path: Path, checkpoint: Path) -> Iterator[SplitServer]:
    tmp_path.chmod(0o700)
    write_cluster_key(str(tmp_path / "key"))
    with ExitStack() as stack:
        sides = []
        for role in ("prefill", "decode"):
            sides.append(SplitSide(tmp_path, checkpoint, role))
            stack.enter_context(sides[-1].program)
            stack.enter_context(sides[-1].client)
        both = SplitServer(*sides)
        both.greet()
        yield both


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(3)
    return [[dice.randrange(1, VOCAB) for _ in range(dice.randrange(2, 80))] for _ in range(count)]


def test_answers_are_those_of_one_engine_and_each_prompt_is_computed_once(
    split: SplitServer,
) -> None:
    asked = prompts(30)
    handed = [split.d.answer(prompt, kv_handle=split.prefill(prompt)) for prompt in asked]
    with split.p.view() as p_view, split.d.view() as d_view:
        at_p, at_d = p_view.stats(), d_view.stats()
    assert at_d.num_fetches_failed == {}
    assert at_p.num_computed_tokens == at_d.num_fetched_tokens == sum(len(p) - 1 for p in asked)
    assert at_d.num_computed_tokens == 30 * GREEDY.max_tokens  # type: ignore[operator]
    assert at_d.num_fetches_failed == {}
    for prompt, output in zip(asked, handed, strict=True):
        assert output.usage is not None
        assert output.usage.fetched_tokens == len(prompt) - 1
        assert split.d.answer(prompt, namespace="alone").tokens == output.tokens
    for side in (split.p, split.d):
        with side.view() as view:
            view.wait_until_free()


def test_an_expired_handle_is_computed_again(split: SplitServer) -> None:
    prompt = prompts(1)[0]
    handle = split.prefill(prompt)
    with split.p.view() as view:
        assert view.stats().leases == 1
        assert eventually(lambda: view.stats().leases == 0)
        view.wait_until_free()
    output = split.d.answer(prompt, kv_handle=handle)
    assert output.finish == "length"
    assert output.usage is not None
    assert output.usage.fetched_tokens == 0
    assert split.fetch_failures() == {"expired": 1}


def test_a_released_lease_is_free_at_once(split: SplitServer) -> None:
    handle = split.prefill(prompts(1)[0])
    split.p.client.send(ReleaseKV(handles=[handle]))
    with split.p.view() as view:
        view.wait_until_free()
        assert view.stats().num_leases_ended == {"released": 1}


def test_d_computes_the_answer_if_p_is_killed(split: SplitServer) -> None:
    prompt = prompts(1)[0]
    plain = split.d.answer(prompt, namespace="alone").tokens
    handle = split.prefill(prompt)
    processes = [pid for pid, _ in descendants_of(split.p.program.process.pid)]
    split.p.program.signal(signal.SIGKILL)
    split.p.program.end()
    assert eventually(lambda: not any(map(is_alive, processes)))  # its worker could still answer
    output = split.d.answer(prompt, kv_handle=handle)
    assert output.tokens == plain
    assert output.usage is not None
    assert output.usage.fetched_tokens == 0
    with split.d.view() as view:
        assert sum(view.stats().num_fetches_failed.values()) == 1
        view.wait_until_free()


def test_a_draining_p_exits_after_its_last_lease(split: SplitServer) -> None:
    prompt = prompts(1)[0]
    handle = split.prefill(prompt)
    split.p.program.signal(signal.SIGTERM)
    output = split.d.answer(prompt, kv_handle=handle)
    assert split.fetch_failures() == {}
    assert output.usage is not None
    assert output.usage.fetched_tokens == len(prompt) - 1
    assert split.p.program.end() == 0
