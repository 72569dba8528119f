"""Faults during a handoff between two real engines: for example, an engine is killed or stopped, or
the client disappears, while there is a request in each state of the handoff.

Each row of the table EXPECTED is one fault, which affects all requests at once. The test checks how
every request ends, that it ends in time, and that all blocks of the engines that are not killed are
free afterwards. `python -m tests.integration.test_split_faults` writes the table into
docs/contribute/split-failures.md.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.engine.messages import Output
from protocol.worker.kv_peers import KVChunk
from tests.support.split_scene import (
    COMPUTED,
    FETCHED,
    SECOND,
    STATES,
    ScenePlace,
    SplitEngines,
    SplitScene,
    scene_of,
)
from tests.support.tiny_checkpoint import write_tiny_llama

pytestmark = pytest.mark.long

DOCUMENT = Path(__file__).parents[2] / "docs" / "contribute" / "split-failures.md"
BEGIN, END = "<!-- tests/integration/test_split_faults.py -->\n", "<!-- end -->\n"

THERE, AGAIN, BY_D = "answer: fetched", "answer: computed again", "answer: computed by D"
LOST, ABORTED, NOBODY = "error `engine_lost`", "aborted", "client gone"


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitEngines]:
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    both = SplitEngines(tmp_path_factory.mktemp("split"), checkpoint)
    try:
        both.answer_undisturbed()
        yield both
    finally:
        both.end()


# ---- what happens then


def nothing(scene: SplitScene) -> None:
    scene.resume()


def kill_p(scene: SplitScene) -> None:
    kill(scene, scene.split.p, scene.split.p.side.process.pid)


def kill_worker_of_p(scene: SplitScene) -> None:
    kill(scene, scene.split.p, scene.workers[scene.split.p])


def kill_d(scene: SplitScene) -> None:
    kill(scene, scene.split.d, scene.split.d.side.process.pid)


def kill_worker_of_d(scene: SplitScene) -> None:
    kill(scene, scene.split.d, scene.workers[scene.split.d])


def kill(scene: SplitScene, place: ScenePlace, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    scene.killed.append(place)
    if place is scene.split.p:
        scene.wire.cut()
    scene.resume()


def stop_p(scene: SplitScene) -> None:
    stop(scene, scene.split.p)


def stop_d(scene: SplitScene) -> None:
    stop(scene, scene.split.d)


def stop(scene: SplitScene, place: ScenePlace) -> None:
    place.side.signal_all(signal.SIGSTOP)
    scene.stopped.append(place)
    scene.resume()


def expire(scene: SplitScene) -> None:
    """Let all leases end. A prompt that is still being computed has no lease yet."""
    scene.router.keeps = False
    scene.wait_until(lambda: scene.split.p.stats().leases == 0)
    scene.router.keeps = True
    scene.cases[COMPUTED].is_held = True
    scene.signal_workers(signal.SIGCONT)
    scene.wait_until(lambda: scene.cases[COMPUTED].kept)
    scene.router.hand_on(scene.cases[COMPUTED])
    scene.wire.release()


def damage(scene: SplitScene) -> None:
    scene.wire.replaces = damaged
    scene.resume()


def damaged(message: Any) -> Any:
    """Change the exponent of a number in a K/V chunk. An answer computed from it would change."""
    if isinstance(message, KVChunk):
        message.data.data[len(message.data.data) // 2 | 3] ^= 0x40
    return message


def abort(scene: SplitScene) -> None:
    scene.is_aborted = True
    for case in scene.cases.values():
        scene.router.abort(case)
    scene.signal_workers(signal.SIGCONT)


def vanish(scene: SplitScene) -> None:
    """Close the connections of the router, which is the client of both engines, without a Goodbye.
    D notices this when it sends the next token."""
    scene.is_deserted = True
    scene.router.vanish()
    scene.signal_workers(signal.SIGCONT)


Row = tuple[Callable[[SplitScene], None], tuple[str, ...], dict[str, int] | None]
EXPECTED: dict[str, Row] = {
    "nothing": (nothing, (THERE,) * 5, {}),
    "a chunk is corrupted": (damage, (AGAIN,) * 4 + (THERE,), {"damaged": 5}),
    "leases expire": (expire, (THERE, AGAIN, AGAIN, AGAIN, THERE), {"expired": 4}),
    "its client aborts": (abort, (ABORTED,) * 5, {"cancelled": 2}),
    "its client vanishes": (vanish, (NOBODY,) * 5, {"cancelled": 2}),
    "P is killed": (kill_p, (BY_D, AGAIN, AGAIN, AGAIN, THERE), {"unreachable": 4}),
    "P's worker is killed": (
        kill_worker_of_p,
        (BY_D, AGAIN, AGAIN, AGAIN, THERE),
        {"unreachable": 4},
    ),
    "P stops, and goes on later": (stop_p, (BY_D, AGAIN, AGAIN, AGAIN, THERE), {"timeout": 4}),
    "D is killed": (kill_d, (LOST,) * 5, None),
    "D's worker is killed": (kill_worker_of_d, (LOST,) * 5, None),
    "D stops, and goes on later": (stop_d, (LOST,) * 5, None),
}
"""fault -> (function that causes it, how the request in each of STATES ends, D's failed fetches by
kind). The fetches include that of SECOND. They are None if D is lost."""


def outcome(scene: SplitScene, state: str) -> str:
    case = scene.cases[state]
    plain = scene.split.plain[state]
    assert case.tokens == plain[: len(case.tokens)], "the answer is another"
    if scene.is_deserted:
        assert case.end is None
        return NOBODY
    assert isinstance(case.end, Output), case.end
    if scene.is_aborted:
        assert case.end.finish == "abort"
        return ABORTED
    if case.end.error is not None:
        return f"error `{case.end.error.code}`"
    assert case.tokens == plain
    assert case.end.usage is not None
    if case.end.usage.fetched_tokens:
        return THERE
    return AGAIN if case.passed else BY_D


def fetches_failed(place: ScenePlace) -> Counter[str]:
    return Counter(place.stats().num_fetches_failed)


def outcomes(split: SplitEngines, fault: str) -> tuple[str, ...]:
    happen, _, failures = EXPECTED[fault]
    with scene_of(split) as scene:
        scene.set_up()
        before = fetches_failed(split.d)
        happen(scene)
        scene.go_on()
        found = tuple(outcome(scene, state) for state in STATES)
        assert outcome(scene, SECOND) == outcome(scene, FETCHED)
        if failures is not None:
            assert fetches_failed(split.d) - before == failures
    return found


@pytest.mark.parametrize("fault", EXPECTED)
def test_every_request_ends_correctly_after_a_fault(split: SplitEngines, fault: str) -> None:
    assert outcomes(split, fault) == EXPECTED[fault][1]


def table() -> list[str]:
    head = "| | " + " | ".join(f"**{state}**" for state in STATES) + " |"
    rows = [f"| **{fault}** | " + " | ".join(row[1]) + " |" for fault, row in EXPECTED.items()]
    return [head, "|---" * (1 + len(STATES)) + "|", *rows]


def documented() -> list[str]:
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()


def test_the_documentation_has_this_table() -> None:
    assert documented() == table()


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + "\n".join(table()) + "\n" + END + rest.partition(END)[2])
