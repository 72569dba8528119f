"""The placement of engines under random losses, joins and reports of a Ray cluster.

`SimulatedRay` checks each action, and that no deadline is in the past. Whatever happens, only ready
engines are listed, a state says whether there is a place, and every place is returned at the end.
Once there are enough nodes, all engines serve.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.support.examples import examples
from tests.support.simulated_ray import NEED, SimulatedRay
from tools.cluster.placement import SUSPECT_S
from tools.cluster.placement_states import PLACED, PlacementState
from tools.cluster.resources import CPU
from tools.processes.restart_policy import MAX_DELAY_S

NUM_EVENTS = 60


class RandomCluster:
    """A cluster to which random things happen."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.num_nodes = 0
        self.engines = [f"engine {number + 1}" for number in range(dice.randrange(1, 5))]
        self.gives_up = dice.random() < 0.5
        self.ray = SimulatedRay(
            {},
            len(self.engines),
            restart_limit=1000,
            start_timeout_s=100.0 if self.gives_up else 1e6,
        )
        self.stops = False
        for _ in range(dice.randrange(4)):
            self.join()

    def join(self, cpus: float = 0.0) -> None:
        self.num_nodes += 1
        self.ray.cpus[f"node {self.num_nodes}"] = cpus or float(self.dice.randrange(1, 13))
        self.ray.report_nodes()

    def kill_node(self) -> None:
        if self.ray.cpus:
            name = self.dice.choice(sorted(self.ray.cpus))
            self.ray.kill_node(name, is_known=self.dice.random() < 0.5)

    def lose(self) -> None:
        if self.ray.places:
            name = self.dice.choice(sorted(self.ray.places))
            self.ray.lose(name, self.dice.choice([None, None, 0, 1, 6, -9]))

    def wait(self) -> None:
        self.ray.wait(self.dice.choice([0.1, 1.0, 5.0, 30.0]))

    def stop(self) -> None:
        if self.dice.random() < 0.1:
            self.stops = True
            self.ray.stop()

    def run(self) -> None:
        events: list[Callable[[], object]] = [
            self.join,
            self.kill_node,
            self.lose,
            self.wait,
            self.stop,
        ]
        events += [self.wait, self.ray.grant, self.ray.start] * 3
        for _ in range(NUM_EVENTS):
            self.dice.choice(events)()
            if self.ray.end is not None:
                return
            self.check()

    def check(self) -> None:
        ready = [place.address for place in self.ray.places.values() if place.is_ready]
        assert sorted(self.ray.listed) == ([] if self.stops else sorted(ready))
        for name in self.engines:
            state, place = self.ray.placement.state(name), self.ray.places.get(name)
            assert (place is not None) == (state in {*PLACED, PlacementState.WAITING})
            assert bool(place and place.node) == (state in PLACED)

    def finish(self) -> None:
        """End a drain; or else add enough nodes, and wait until all engines serve."""
        if self.stops:
            for name in list(self.ray.places):
                self.ray.lose(name, 0)
            assert self.ray.end is not None
            return
        for _ in self.engines:
            self.join(NEED[CPU])
        for _ in range(2):
            self.ray.wait(MAX_DELAY_S + SUSPECT_S)
            self.ray.grant()
            self.ray.start()
        if self.gives_up and self.ray.end is not None:
            return
        assert len(self.ray.listed) == len(self.engines)
        self.ray.stop(at_once=True)


@pytest.mark.parametrize("seed", range(examples(100, 5000)))
def test_engines_are_placed_whatever_happens(seed: int) -> None:
    cluster = RandomCluster(random.Random(seed))
    cluster.run()
    if cluster.ray.end is None:
        cluster.finish()
    assert cluster.ray.end is not None
    assert cluster.ray.places == {}
