"""The asyncio client with a real engine has the methods and the answers of the blocking one."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.engine.messages import Output
from protocol.sdk.async_client import AsyncClient
from protocol.sdk.client import Client
from protocol.wire.errors import EngineNotReady, InvalidRequest, ServingError
from tests.support.tiny_engine import tiny_engine
from tests.support.waiting import HANG_S, eventually_async

PROMPT, LONG = [5, 6, 7], 1500


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with tiny_engine(context_tokens=2000) as (_, address):
        Client(address, wait_s=HANG_S).close()
        yield address


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[AsyncClient]:
    async with asyncio.timeout(HANG_S), AsyncClient(address, wait_s=HANG_S) as engine:
        yield engine


async def until_idle(engine: AsyncClient) -> None:
    async def is_idle() -> bool:
        return not (await engine.get_status()).stats.running

    assert await eventually_async(is_idle)


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(AsyncClient, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name


def test_a_connected_client_has_the_engines_stats(address: str) -> None:
    with Client(address) as engine:
        assert engine.stats.total_blocks > 0

    async def look() -> None:
        async with connected(address) as engine:
            assert engine.stats.total_blocks > 0
            assert engine.model.vocab_size > 0
            assert engine.limits.max_len == 2000

    asyncio.run(look())


def test_many_answers_at_once_are_those_of_the_blocking_client(address: str) -> None:
    with Client(address) as engine:
        expected = [
            engine.generate([n], max_tokens=20, temperature=0).tokens() for n in range(5, 25)
        ]

    async def ask() -> list[list[int]]:
        async with connected(address) as engine:
            asked = [engine.generate([n], max_tokens=20, temperature=0) for n in range(5, 25)]
            return list(await asyncio.gather(*(each.tokens() for each in asked)))

    assert asyncio.run(ask()) == expected


def test_an_answer_is_iterated_while_it_is_generated(address: str) -> None:
    async def ask() -> list[Output]:
        async with connected(address) as engine:
            answer = engine.generate(PROMPT, max_tokens=9, ignore_eos=True)
            return [output async for output in answer]

    outputs = asyncio.run(ask())
    assert sum(len(output.tokens) for output in outputs) == 9
    assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish == "length"


async def _break(engine: AsyncClient) -> None:
    async for _ in engine.generate(PROMPT, max_tokens=LONG, ignore_eos=True):
        break
    gc.collect()


async def _close(engine: AsyncClient) -> None:
    answer = engine.generate(PROMPT, max_tokens=LONG, ignore_eos=True)
    await anext(answer)
    answer.close()


async def _cancel(engine: AsyncClient) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, max_tokens=LONG, ignore_eos=True).tokens())

    async def is_running() -> int:
        return (await engine.get_status()).stats.running

    assert await eventually_async(is_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()


@pytest.mark.parametrize("leave", [_break, _close, _cancel])
def test_leaving_an_answer_early_aborts_it(
    address: str, leave: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with connected(address) as engine:
            await leave(engine)
            await until_idle(engine)
            assert engine.stats.free_blocks <= engine.stats.total_blocks

    asyncio.run(run())


def test_a_refusal_is_raised_with_its_own_type(address: str) -> None:
    async def run() -> None:
        async with connected(address) as engine:
            with pytest.raises(InvalidRequest, match="temperature"):
                engine.generate(PROMPT, temperature=9)
            with pytest.raises(ServingError):
                await engine.generate([1 << 30]).tokens()
            with pytest.raises(InvalidRequest):
                await engine.profile(0, "/tmp")

    asyncio.run(run())


def test_requests_are_aborted_by_name(address: str) -> None:
    async def run() -> None:
        async with connected(address) as engine:
            answer = engine.generate(PROMPT, max_tokens=LONG, ignore_eos=True, labels=["a"])
            await anext(answer)
            result = await engine.abort_by_label(["a", "b"])
            assert (result.aborted, result.unknown) == (["a"], ["b"])
            outputs = [output async for output in answer]
            assert outputs[-1].finish == "abort"

    asyncio.run(run())


def test_closing_aborts_open_requests_and_may_be_repeated(address: str) -> None:
    async def run() -> None:
        engine = AsyncClient(address)
        await engine.close()
        await engine.start()
        answer = engine.generate(PROMPT, max_tokens=LONG, ignore_eos=True)
        await anext(answer)
        await engine.close()
        await engine.close()
        async with connected(address) as other:
            await until_idle(other)

    asyncio.run(run())


def test_a_missing_engine_is_reported(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(EngineNotReady, match="no engine answered"):
            await AsyncClient(f"ipc://{tmp_path}/none", wait_s=0.1).start()

    asyncio.run(run())
