"""Requests of two real engines, one in each state of a hand-over, all standing still until the test
lets something happen to them.

The engines have a tiny model. K/V goes over a wire that holds it back (kv_proxy.py), workers are
stopped by SIGSTOP, and the router (router.py) goes no further than it is told.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from engine_core.kv.handle import Seal
from protocol.client import Client
from protocol.cluster_key import read_cluster_key, write_cluster_key
from protocol.kv_peers import KVChunk
from protocol.stats import EngineStats
from tests.support.engine_view import EngineView, is_free
from tests.support.kv_proxy import Proxy
from tests.support.router import Router, RouterCase, all_ended, greedy
from tests.support.tiny_checkpoint import VOCAB
from tests.support.tiny_side import START_S, TinySide
from tests.support.waiting import eventually

KV_LEASE_S, KV_TIMEOUT_S, CLIENT_LEASE_S = 1.0, 3.0, 3.0
STOPPED_S = 600.0
"""Here nobody is lost because the scene stands still."""
FREE_WITHIN_S = 60.0
ANSWER_WITHIN_S = 60.0
"""Silence, then a slot, then a fetch that fails; and then it is computed."""
STANDS_WITHIN_S = 60.0

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


class ScenePlace:
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


class SplitEngines:
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
            "stopped_timeout_s": STOPPED_S,
            "prefix_cache": False,
        }
        worker = {"kv_blocks": 513, "kv_mover": "zmq"}
        self.p = ScenePlace(
            directory,
            checkpoint,
            "prefill",
            token_budget=64,
            worker={"max_slots": 4, **worker},
            **shared,
        )
        self.d = ScenePlace(
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
        with Client(self.d.side.address, wait_s=START_S) as d:
            for state, prompt in prompts().items():
                asked = d.generate(prompt, greedy(sized(state)[1]))
                self.plain[state] = asked.tokens()

    def end(self) -> None:
        for place in self.places:
            place.end()
        self.context.destroy(linger=0)

    @property
    def places(self) -> tuple[ScenePlace, ScenePlace]:
        return self.p, self.d


# ---- one request in each state


@dataclass
class SplitScene:
    """Until it happens both workers stand still, and so does every request.

    wire      between the workers: it holds chunks, and breaks when P's dies
    workers   their process ids, D's first: it is about to go on
    stopped   engines that stand still until all have heard how their requests end
    killed    engines that are no more
    """

    split: SplitEngines
    wire: Proxy
    router: Router
    workers: dict[ScenePlace, int]
    cases: dict[str, RouterCase] = field(default_factory=dict)
    stopped: list[ScenePlace] = field(default_factory=list)
    killed: list[ScenePlace] = field(default_factory=list)
    is_deserted: bool = False
    is_aborted: bool = False

    def set_up(self) -> None:
        for state, prompt in prompts().items():
            is_held = state != COMPUTED
            self.cases[state] = RouterCase(prompt, sized(state)[1], is_held=is_held)
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

    def await_free(self, place: ScenePlace) -> None:
        def claim() -> bool:
            return is_free(place.stats())

        if self.is_deserted:
            is_in_time = eventually(claim, within_s=FREE_WITHIN_S)
        else:
            is_in_time = self.router.until(claim, FREE_WITHIN_S)
        assert is_in_time, place.stats()


@contextmanager
def scene_of(split: SplitEngines) -> Iterator[SplitScene]:
    for place in split.places:
        place.side.await_ready()
    split.num_scenes += 1
    address = f"ipc://{split.directory}/wire{split.num_scenes}"
    wire = Proxy(split.context, address, split.p.side.address + ".kv")

    def over_the_wire(case: RouterCase, handle: str) -> str:
        """One that goes on by itself does without: the wire is held."""
        if case.max_tokens == LONG_ANSWER:
            return handle
        return split.seal.to_text(replace(split.seal.from_text(handle), address=address))

    router = Router(split.p.side.address, split.d.side.address, over_the_wire)
    with wire:
        workers = {place: place.side.worker_pid for place in (split.d, split.p)}
        scene = SplitScene(split, wire, router, workers)
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
