"""Two real engines with one request in each state of a handoff. All requests wait for the test.

The engines have a tiny model. A proxy holds K/V messages back (kv_proxy.py), SIGSTOP stops the
workers, and the router (router.py) continues a request only on the test's command.
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

from engine_core.kv.seal import Seal
from protocol.engine.stats import EngineStats
from protocol.sdk.client import Client
from protocol.wire.cluster_key import read_cluster_key, write_cluster_key
from protocol.worker.kv_peers import KVChunk
from tests.support.engine_view import EngineView, is_free
from tests.support.kv_proxy import Proxy
from tests.support.router import Router, RouterCase, all_ended, greedy
from tests.support.tiny_checkpoint import VOCAB
from tests.support.tiny_side import START_S, TinySide
from tests.support.waiting import eventually

KV_LEASE_S, KV_TIMEOUT_S, CLIENT_LEASE_S = 2.0, 4.0, 4.0
STOPPED_S = 600.0
"""Engines wait this long for a stopped worker, so no worker is given up during the set-up."""
FREE_WITHIN_S = 60.0
ANSWER_WITHIN_S = 60.0
"""Time limit of the slowest answer: an engine is silent, then a request waits for a slot, its fetch
fails, and its prompt is computed."""
SET_UP_WITHIN_S = 60.0

LONG_PROMPT, LONG_ANSWER = 300, 500
"""P computes the long prompt in several steps. D streams the long answer for longer than it takes
to stop its worker."""
COMPUTED, KEPT, WAITS, FETCHED, GOES_ON = STATES = (
    "is computed by P",
    "is kept by P",
    "waits at D",
    "is fetched",
    "goes on",
)
SECOND = "is fetched, the second"
"""State of a second request whose K/V is fetched. It takes D's last slot, so the request in the
state WAITS has to wait. It must end like the request in the state FETCHED."""


def sized(state: str) -> tuple[int, int]:
    """Return (tokens of the prompt, tokens of the answer) of the request in a state."""
    return {COMPUTED: (LONG_PROMPT, 12), GOES_ON: (50, LONG_ANSWER)}.get(state, (50, 12))


def prompts() -> dict[str, list[int]]:
    dice = random.Random(3)
    return {
        state: [dice.randrange(1, VOCAB) for _ in range(sized(state)[0])]
        for state in (*STATES, SECOND)
    }


# ---- two engines that may be restarted


class ScenePlace:
    """One of the two engines. It is started again after each scene that killed it."""

    def __init__(self, directory: Path, checkpoint: Path, role: str, **config: Any) -> None:
        self._directory, self._checkpoint, self._role = directory, checkpoint, role
        self._config = config
        self._num_starts = 0
        self.start()

    def start(self) -> None:
        """Start the engine at a new address, which clients of the previous process do not use."""
        self._num_starts += 1
        self._view: EngineView | None = None
        name = f"{self._role}{self._num_starts}"
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
    """The two engines, and the objects that all scenes share.

    plain   state -> the undisturbed answer to its request
    """

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
    """One request in each state, with both workers stopped.

    wire          the proxy between the workers, which holds chunks back
    workers       process ids of the workers, D's first
    stopped       engines that stay stopped until all requests have ended
    killed        engines that were killed
    is_deserted   whether the router is gone
    is_aborted    whether the requests are aborted
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
        self.wait_until(lambda: all(case.kept for case in held))
        self.wire.holds = lambda message: isinstance(message, KVChunk)
        self.router.hand_on(self.cases[FETCHED])
        self.wait_until(lambda: self.wire.num_held == 1)
        self.router.hand_on(self.cases[SECOND])
        self.wait_until(lambda: self.split.d.stats().fetching == 2)
        self.router.hand_on(self.cases[GOES_ON])
        self.wait_until(lambda: self.cases[GOES_ON].tokens)
        self.signal_workers(signal.SIGSTOP)
        self.router.hand_on(self.cases[WAITS])
        self.router.ask(self.cases[COMPUTED])
        self.wait_until(lambda: self.split.p.stats().running == self.split.d.stats().waiting == 1)
        self.check()

    def signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to the workers of engines that are neither killed nor stopped."""
        for place, worker_pid in self.workers.items():
            if place not in (*self.killed, *self.stopped):
                os.kill(worker_pid, number)

    def resume(self) -> None:
        """Let the workers and the proxy continue."""
        self.signal_workers(signal.SIGCONT)
        self.wire.release()

    def wait_until(self, claim: Callable[[], object]) -> None:
        assert self.router.until(claim, SET_UP_WITHIN_S), "a request does not reach its state"

    def check(self) -> None:
        """Check that the requests are in the states that they are named after."""
        at_p, at_d = self.split.p.stats(), self.split.d.stats()
        assert (at_p.running, at_p.waiting, at_p.leases) == (1, 0, 4), at_p
        assert (at_d.fetching, at_d.waiting) == (2, 1), at_d
        assert self.cases[GOES_ON].end is None

    def go_on(self) -> None:
        """Run the router and the engines until all requests have ended and all engines are free."""
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
        """Return `handle` with the proxy's address; unchanged for the request in the state GOES_ON,
        whose K/V is not held back."""
        if case.max_tokens == LONG_ANSWER:
            return handle
        return split.seal.to_text(replace(split.seal.from_text(handle), address=address))

    router = Router(split.p.side.address, split.d.side.address, over_the_wire)
    with wire:
        workers = {place: place.side.worker_pid for place in (split.d, split.p)}
        scene = SplitScene(split, wire, router, workers)
        scene.wait_until(lambda: router.p.session.is_ready and router.d.session.is_ready)
        try:
            yield scene
        except BaseException:
            scene.killed = list(split.places)  # their state is unknown, so both are restarted
            raise
        finally:
            if not scene.is_deserted:
                router.leave()
            for place in scene.killed:
                place.end()
                place.start()
