"""Whatever goes wrong with a hand-over, for real: two engines with their workers, as processes, of
which one is killed, stopped, or deserted, while requests stand in each of the hand-over's states.

A row of the table is one fault that hits all of them at once. How each ends is compared, and within
which time; then the blocks of every engine that lives are free. The table is EXPECTED;
`python -m tests.integration.test_split_faults` writes it into docs/split.md.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from engine_core.kv.handle import Seal
from protocol.client import Engine
from protocol.cluster_key import read_cluster_key, write_cluster_key
from protocol.kv_peers import KVChunk
from protocol.messages import Output
from protocol.stats import EngineStats
from tests.support.engine_view import EngineView
from tests.support.kv_proxy import Proxy
from tests.support.processes import eventually
from tests.support.router import Case, Router, all_ended, greedy
from tests.support.tiny_checkpoint import VOCAB, write_tiny_llama
from tests.support.tiny_side import START_S, TinySide

DOCUMENT = Path(__file__).parents[2] / "docs" / "split.md"
BEGIN, END = "<!-- tests/integration/test_split_faults.py -->\n", "<!-- end -->\n"

KV_LEASE_S, KV_TIMEOUT_S, CLIENT_LEASE_S = 1.0, 3.0, 3.0
ERROR_WITHIN_S, FREE_WITHIN_S = 5.0, 5.0
"""The client notices after 4 s that an engine is silent (protocol/session.py)."""
ANSWER_WITHIN_S = 20.0
"""Silence, then a slot, then a fetch that fails; and then it is computed."""
STANDS_WITHIN_S = 10.0

LONG_PROMPT, LONG_ANSWER = 300, 500
"""Computed by P in several steps; streamed by D for longer than it takes to stop its worker."""
COMPUTED, KEPT, WAITS, FETCHED, GOES_ON = STATES = (
    "is computed by P",
    "is kept by P",
    "waits at D",
    "is fetched",
    "goes on",
)
SECOND = "is fetched, the second"
"""It has the slot for which another one waits; what becomes of it is what becomes of the first."""

THERE, AGAIN, BY_D = "answer: fetched", "answer: computed again", "answer: computed by D"
LOST, ABORTED, NOBODY = "error `engine_lost`", "aborted", "nobody is told"


def sized(state: str) -> tuple[int, int]:
    """Tokens of its prompt and of its answer."""
    return {COMPUTED: (LONG_PROMPT, 12), GOES_ON: (50, LONG_ANSWER)}.get(state, (50, 12))


def prompts() -> dict[str, list[int]]:
    dice = random.Random(3)
    return {
        state: [dice.randrange(1, VOCAB) for _ in range(sized(state)[0])]
        for state in (*STATES, SECOND)
    }


# ---- two engines, each in one of its lives


class Place:
    """Where one of the two engines runs, again and again."""

    def __init__(self, directory: Path, checkpoint: Path, role: str, **config: Any) -> None:
        self._directory, self._checkpoint, self._role = directory, checkpoint, role
        self._config = config
        self._lives = 0
        self.begin()

    def begin(self) -> None:
        """A new life, at an address of its own: who knows the old one stays alone with it."""
        self._lives += 1
        self._view: EngineView | None = None
        name = f"{self._role}{self._lives}"
        self.side = TinySide(
            self._directory, self._checkpoint, self._role, name=name, **self._config
        )

    def end(self) -> None:
        if self._view is not None:
            self._view.close()
        self.side.__exit__(None, None, None)

    def stats(self) -> EngineStats:
        if self._view is None:
            self._view = EngineView(self.side.address)
        return self._view.stats()


class Split:
    """plain: the undisturbed answers, by state."""

    def __init__(self, directory: Path, checkpoint: Path) -> None:
        directory.chmod(0o700)
        write_cluster_key(str(directory / "key"))
        key = read_cluster_key(str(directory / "key"))
        assert key is not None
        self.directory, self.seal = directory, Seal(key.derive("kv"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        shared: dict[str, Any] = {
            "kv_lease_s": KV_LEASE_S,
            "kv_timeout_s": KV_TIMEOUT_S,
            "lease_s": CLIENT_LEASE_S,
            "prefix_cache": False,
        }
        worker = {"kv_blocks": 513, "kv_mover": "zmq"}
        self.p = Place(
            directory,
            checkpoint,
            "prefill",
            token_budget=64,
            worker={"max_slots": 4, **worker},
            **shared,
        )
        self.d = Place(
            directory,
            checkpoint,
            "decode",
            token_budget=512,
            worker={"max_slots": 3, **worker},
            **shared,
        )
        self.plain: dict[str, list[int]] = {}
        self.num_scenes = 0

    def answer_undisturbed(self) -> None:
        with Engine(self.d.side.address, wait_s=START_S) as d:
            for state, prompt in prompts().items():
                asked = d.generate(prompt, greedy(sized(state)[1]))
                self.plain[state] = asked.tokens()

    @property
    def places(self) -> tuple[Place, Place]:
        return self.p, self.d


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    both = Split(tmp_path_factory.mktemp("split"), checkpoint)
    try:
        both.answer_undisturbed()
        yield both
    finally:
        for place in both.places:
            place.end()
        both.context.destroy(linger=0)


# ---- one request in each state


@dataclass
class Scene:
    """Until it happens both workers stand still, and so does every request.

    wire      between the workers: it holds chunks, and breaks when P's dies
    workers   their process ids, D's first: it is about to go on
    moment    when it happened
    stopped   engines that stand still until all have heard how their requests end
    killed    engines that are no more
    """

    split: Split
    wire: Proxy
    router: Router
    workers: dict[Place, int]
    cases: dict[str, Case] = field(default_factory=dict)
    moment: float = 0.0
    stopped: list[Place] = field(default_factory=list)
    killed: list[Place] = field(default_factory=list)
    is_deserted: bool = False
    is_aborted: bool = False

    def set_up(self) -> None:
        for state, prompt in prompts().items():
            is_held = state != COMPUTED
            self.cases[state] = Case(prompt, sized(state)[1], is_held=is_held)
        held = [case for case in self.cases.values() if case.is_held]
        for case in held:
            self.router.ask(case)
        self.await_that(lambda: all(case.kept for case in held))
        self.wire.holds = lambda message: isinstance(message, KVChunk)
        self.router.hand_on(self.cases[FETCHED])
        self.await_that(lambda: self.wire.num_held == 1)
        self.router.hand_on(self.cases[SECOND])
        self.await_that(lambda: self.split.d.stats().fetching == 2)
        self.router.hand_on(self.cases[GOES_ON])
        self.await_that(lambda: self.cases[GOES_ON].tokens)
        self.signal_workers(signal.SIGSTOP)
        self.router.hand_on(self.cases[WAITS])
        self.router.ask(self.cases[COMPUTED])
        self.await_that(lambda: self.split.p.stats().running == self.split.d.stats().waiting == 1)
        self.check()

    def signal_workers(self, number: signal.Signals) -> None:
        """Of engines that are there."""
        for place, worker_pid in self.workers.items():
            if place not in (*self.killed, *self.stopped):
                os.kill(worker_pid, number)

    def resume(self) -> None:
        """It has happened: whoever can goes on."""
        self.signal_workers(signal.SIGCONT)
        self.wire.release()

    def await_that(self, claim: Callable[[], object]) -> None:
        assert self.router.until(claim, STANDS_WITHIN_S), "it does not come to stand there"

    def check(self) -> None:
        """Each is where it should be."""
        at_p, at_d = self.split.p.stats(), self.split.d.stats()
        assert (at_p.running, at_p.waiting, at_p.leases) == (1, 0, 4), at_p
        assert (at_d.fetching, at_d.waiting) == (2, 1), at_d
        assert self.cases[GOES_ON].end is None

    def go_on(self) -> None:
        """What the router and the engines do from here on, until all is over."""
        if not self.is_deserted:
            self.router.hand_on(self.cases[KEPT])
            is_over = self.router.until(lambda: all_ended(self.cases.values()), ANSWER_WITHIN_S)
            assert is_over, [state for state, case in self.cases.items() if case.end is None]
        for place in self.stopped:
            place.side.signal_all(signal.SIGCONT)
        for place in self.split.places:
            if place not in self.killed:
                self.await_free(place)

    def await_free(self, place: Place) -> None:
        def is_free() -> bool:
            return has_all_free(place.stats())

        if self.is_deserted:
            is_in_time = eventually(is_free, within_s=FREE_WITHIN_S)
        else:
            is_in_time = self.router.until(is_free, FREE_WITHIN_S)
        assert is_in_time, place.stats()

    def outcome(self, state: str) -> str:
        case = self.cases[state]
        plain = self.split.plain[state]
        assert case.tokens == plain[: len(case.tokens)], "the answer is another"
        if self.is_deserted:
            assert case.end is None
            return NOBODY
        assert isinstance(case.end, Output), case.end
        if self.is_aborted:
            assert case.end.finish == "abort"
            assert case.ended_at - self.moment < ERROR_WITHIN_S
            return ABORTED
        if case.end.error is not None:
            assert case.ended_at - self.moment < ERROR_WITHIN_S
            return f"error `{case.end.error.code}`"
        assert case.tokens == plain
        assert case.end.usage is not None
        if case.end.usage.fetched_tokens:
            return THERE
        return AGAIN if case.brought else BY_D


def has_all_free(stats: EngineStats) -> bool:
    is_idle = not (stats.running or stats.waiting or stats.fetching or stats.leases)
    return is_idle and stats.free_blocks == stats.total_blocks


@contextmanager
def scene_of(split: Split) -> Iterator[Scene]:
    for place in split.places:
        place.side.await_ready()
    split.num_scenes += 1
    address = f"ipc://{split.directory}/wire{split.num_scenes}"
    wire = Proxy(split.context, address, split.p.side.address + ".kv")

    def over_the_wire(case: Case, handle: str) -> str:
        """One that goes on by itself does without: the wire is held."""
        if case.max_tokens == LONG_ANSWER:
            return handle
        return split.seal.close(replace(split.seal.open(handle), address=address))

    router = Router(split.p.side.address, split.d.side.address, over_the_wire)
    with wire:
        workers = {place: place.side.worker_pid for place in (split.d, split.p)}
        scene = Scene(split, wire, router, workers)
        scene.await_that(lambda: router.p.session.is_ready and router.d.session.is_ready)
        try:
            yield scene
        except BaseException:
            scene.killed = list(split.places)  # who knows what they hold
            raise
        finally:
            if not scene.is_deserted:
                router.leave()
            for place in scene.killed:
                place.end()
                place.begin()


# ---- what happens then


def nothing(scene: Scene) -> None:
    scene.resume()


def kill_p(scene: Scene) -> None:
    kill(scene, scene.split.p, scene.split.p.side.process.pid)


def kill_worker_of_p(scene: Scene) -> None:
    kill(scene, scene.split.p, scene.workers[scene.split.p])


def kill_d(scene: Scene) -> None:
    kill(scene, scene.split.d, scene.split.d.side.process.pid)


def kill_worker_of_d(scene: Scene) -> None:
    kill(scene, scene.split.d, scene.workers[scene.split.d])


def kill(scene: Scene, place: Place, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    scene.killed.append(place)
    if place is scene.split.p:
        scene.wire.cut()
    scene.resume()


def stop_p(scene: Scene) -> None:
    stop(scene, scene.split.p)


def stop_d(scene: Scene) -> None:
    stop(scene, scene.split.d)


def stop(scene: Scene, place: Place) -> None:
    place.side.signal_all(signal.SIGSTOP)
    scene.stopped.append(place)
    scene.resume()


def expire(scene: Scene) -> None:
    """What is still computed has no lease yet. Once it is done, P's worker knows which are over."""
    scene.router.keeps = False
    scene.await_that(lambda: scene.split.p.stats().leases == 0)
    scene.router.keeps = True
    scene.cases[COMPUTED].is_held = True
    scene.signal_workers(signal.SIGCONT)
    scene.await_that(lambda: scene.cases[COMPUTED].kept)
    scene.router.hand_on(scene.cases[COMPUTED])
    scene.wire.release()


def damage(scene: Scene) -> None:
    scene.wire.replaces = damaged
    scene.resume()


def damaged(message: Any) -> Any:
    """A number in its middle has another exponent: an answer that rests on it is another."""
    if isinstance(message, KVChunk):
        message.data.data[len(message.data.data) // 2 | 3] ^= 0x40
    return message


def abort(scene: Scene) -> None:
    scene.is_aborted = True
    for case in scene.cases.values():
        scene.router.abort(case)
    scene.signal_workers(signal.SIGCONT)


def vanish(scene: Scene) -> None:
    """D hears of it when it tells the next token."""
    scene.is_deserted = True
    scene.router.vanish()
    scene.signal_workers(signal.SIGCONT)


Row = tuple[Callable[[Scene], None], tuple[str, ...], dict[str, int] | None]
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
"""what happens -> (how, what becomes of a request in each of STATES, the fetches of D that fail, by
kind, with that of SECOND; None: of a D that is lost)"""


def fetches_failed(place: Place) -> Counter[str]:
    return Counter(place.stats().num_fetches_failed)


def outcomes(split: Split, fault: str) -> tuple[str, ...]:
    happen, _, failures = EXPECTED[fault]
    with scene_of(split) as scene:
        scene.set_up()
        before = fetches_failed(split.d)
        scene.moment = time.monotonic()
        happen(scene)
        scene.go_on()
        found = tuple(scene.outcome(state) for state in STATES)
        assert scene.outcome(SECOND) == scene.outcome(FETCHED)
        if failures is not None:
            assert fetches_failed(split.d) - before == failures
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", EXPECTED)
def test_what_becomes_of_requests_when(split: Split, fault: str) -> None:
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
