"""A fleet under random requests, stops and failures, with simulated gateways and engines.

Gateways follow the rules of protocol/tools/control.py, with delays. Whatever happens, no model is
drained under a request, the plan and `max_loaded` are kept, and every request is served in the end.
Time advances only to the next event or to the fleet's own deadline, so a deadline that the fleet
forgets to name shows as a request that is never served.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from protocol.tools.control import ModelStates, ReportUse
from tests.support.examples import examples
from tools.processes.fleet import DrainModel, Fleet, FleetAction, FleetLimits, ModelRefused
from tools.processes.model_phases import LOADED

REQUESTS_UNTIL_S = 120.0
END_S = 3000.0
"""All requests must have been served by then."""


class SimulatedGateway:
    """One gateway process, which keeps requests until their model is ready."""

    def __init__(self, scene: FleetScene, number: int) -> None:
        self.scene, self.number = scene, number
        self.states: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.version = 0
        self.open: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.asked: set[str] = set()  # models requested since their state last changed

    def request(self, model: str) -> None:
        self.kept[model] += 1
        self.serve(model)

    def serve(self, model: str) -> None:
        """Give the kept requests of a model to its engine, or request the model."""
        if self.states.get(model) == "ready":
            for _ in range(self.kept.pop(model, 0)):
                if model not in self.scene.running:
                    assert self.scene.can_fail, "a request for a model that is not loaded"
                    self.scene.num_lost += 1
                    continue
                self.open[model] += 1
                self.scene.later(self.scene.random.expovariate(1.0), partial(self.end, model))
        elif self.kept[model] and model not in self.asked:
            self.asked.add(model)
            self.scene.request(model, self)

    def refuse(self, model: str) -> None:
        self.scene.num_refused += self.kept.pop(model, 0)

    def end(self, model: str) -> None:
        if self.open[model]:  # else it was lost with its engine
            self.open[model] -= 1
            self.scene.num_served += 1

    def receive(self, states: ModelStates) -> None:
        if states.version <= self.version:
            return
        self.version = states.version
        versions = {each.name: each.version for each in states.models}
        changed = {name for name in versions if versions[name] != self.versions.get(name)}
        self.versions = versions
        self.states = {each.name: each.state for each in states.models}
        for model in changed:
            was_asked = model in self.asked
            self.asked.discard(model)
            if was_asked and self.states[model] == "failed":
                self.refuse(model)
            self.serve(model)
        self.report()

    def report(self) -> None:
        report = ReportUse(open=dict(self.open), kept=dict(+self.kept), version=self.version)
        self.open = Counter({name: n for name, n in self.open.items() if n})
        self.scene.later(self.scene.delay(), partial(self.scene.on_report, self.number, report))

    def report_regularly(self) -> None:
        self.report()
        self.scene.later(1.0, self.report_regularly)


class FleetScene:
    """A fleet, its gateways and its engines, on a clock of their own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_served = self.num_refused = self.num_lost = 0
        self.running: set[str] = set()
        self.sizes = {name: self.random.randint(1, 6) for name in "abcde"}
        self.limits = FleetLimits(
            memory_bytes=self.random.choice((0, 6, 9)),
            max_loaded=self.random.choice((0, 1, 2, 3)),
            idle_unload_s=self.random.choice((0.0, 5.0)),
        )
        self.fleet = Fleet(self.sizes, self.limits, 0.0)
        self.can_fail = self.random.random() < 0.3
        self.life = dict.fromkeys(self.sizes, 0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.gateways = [SimulatedGateway(self, number) for number in range(2)]

    def delay(self) -> float:
        return self.random.choice((0.001, 0.01, 0.3))

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), event))

    # ---- the supervisor's part

    def request(self, model: str, gateway: SimulatedGateway) -> None:
        def arrive() -> None:
            try:
                self.perform(self.fleet.on_request(model, self.now, gateway.number))
            except ModelRefused:
                gateway.asked.discard(model)
                gateway.refuse(model)

        self.later(0.001, arrive)

    def on_report(self, number: int, report: ReportUse) -> None:
        self.perform(self.fleet.on_report(number, report, self.now))

    def perform(self, actions: Sequence[FleetAction]) -> None:
        for action in actions:
            model = action.model
            life = self.life[model] = self.life[model] + 1
            if isinstance(action, DrainModel):
                assert not any(gateway.open[model] for gateway in self.gateways), model
                assert model in self.running
                self.later(self.random.uniform(0.1, 3.0), partial(self.exit, model, life))
                continue
            assert model not in self.running
            self.running.add(model)
            load_s = self.random.uniform(0.2, 10.0)
            if self.can_fail and self.random.random() < 0.2:
                self.later(load_s, partial(self.exit, model, life, "no memory"))
            else:
                self.later(load_s, partial(self.become_ready, model, life))
        self.check()
        states = self.fleet.states()
        for gateway in self.gateways:
            self.later(self.delay(), partial(gateway.receive, states))

    def become_ready(self, model: str, life: int) -> None:
        if self.life[model] == life:
            self.perform(self.fleet.on_ready(model, self.now))

    def exit(self, model: str, life: int, error: str = "") -> None:
        if self.life[model] != life:
            return
        self.life[model] += 1
        self.running.discard(model)
        for gateway in self.gateways:
            self.num_lost += gateway.open.pop(model, 0)
        self.perform(self.fleet.on_exit(model, error, self.now))

    def check(self) -> None:
        loaded = {name for name in self.sizes if self.fleet.phase(name) in LOADED}
        assert loaded == self.running
        used = sum(self.sizes[name] for name in loaded)
        assert used <= (self.limits.memory_bytes or used)
        assert len(loaded) <= (self.limits.max_loaded or len(loaded))

    # ---- time

    def is_past(self, time: float) -> bool:
        return self.now >= time

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            assert self.now < END_S, "a request is never served"
            when, deadline = self._events[0][0], self.fleet.deadline
            if deadline is not None and deadline < when:
                assert deadline >= self.now, "a deadline in the past"
                self.now = deadline
                self.perform(self.fleet.tick(self.now))
                assert self.fleet.deadline != self.now, "the fleet wakes up again and again"
                continue
            self.now, _, event = heapq.heappop(self._events)
            event()


@pytest.mark.parametrize("seed", range(examples(60, 2000)))
def test_every_request_is_served_and_no_model_is_drained_under_one(seed: int) -> None:
    scene = FleetScene(seed)
    num_requests = 0
    for gateway in scene.gateways:
        gateway.report_regularly()
    while scene.now < REQUESTS_UNTIL_S:
        model, gateway = scene.random.choice(list(scene.sizes)), scene.random.choice(scene.gateways)
        for _ in range(scene.random.choice((1, 1, 4))):
            gateway.request(model)
            num_requests += 1
        if scene.random.random() < 0.1:
            stopped = scene.random.choice(list(scene.sizes))
            scene.perform(scene.fleet.on_stop(stopped, scene.now))
        if scene.can_fail and scene.running and scene.random.random() < 0.05:
            killed = scene.random.choice(sorted(scene.running))
            scene.exit(killed, scene.life[killed], "killed")
        scene.run(partial(scene.is_past, scene.now + scene.random.expovariate(1.0)))

    def num_ended() -> int:
        return scene.num_served + scene.num_refused + scene.num_lost

    scene.run(lambda: num_ended() == num_requests)
    assert scene.num_served > 0
    if not scene.can_fail and not scene.limits.memory_bytes:
        assert scene.num_served == num_requests
