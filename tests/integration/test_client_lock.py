"""The blocking client when the garbage collector closes an abandoned answer at a bad moment."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any, overload

from protocol.sdk.client import Client, Generation
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import HANG_S, eventually


class CollectingPrompt(Sequence[int]):
    """A prompt that runs the garbage collector while the client holds its lock to read it."""

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        return [1][index]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        gc.collect()
        return iter([1])


def abandon(generation: Generation) -> None:
    """Make an answer garbage that only the garbage collector finds."""
    cycle: list[object] = [generation]
    cycle.append(cycle)


def test_an_answer_that_is_collected_while_the_client_is_locked_is_aborted(
    engine: ScriptedEngine,
) -> None:
    engine.is_paused = True
    client = Client(engine.address, wait_s=HANG_S)
    abandon(client.generate([1]))
    assert eventually(lambda: len(engine.generates) == 1)
    found: list[Generation] = []
    # A thread that may be left behind: a client that waits for itself never returns.
    opener = Thread(target=lambda: found.append(client.generate(CollectingPrompt())), daemon=True)
    opener.start()
    opener.join(HANG_S)
    assert found, "the client waits for its own lock"
    assert eventually(lambda: list(engine.aborts) == [engine.generates[0].request])
    engine.is_paused = False
    assert [output.finish for output in found[0]][-1] == "stop"
    client.close()
