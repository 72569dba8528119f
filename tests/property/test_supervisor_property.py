"""A supervisor under random exits, readiness, signals and requests, with simulated processes.

Whatever happens, it starts and signals only what exists, a server with a replica that serves does
not end by itself, and a server that stops does end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from signal import SIGKILL, SIGQUIT, SIGTERM

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.examples import examples
from tools.processes.actions import Action, EndServer, ProcessExit, SendSignal, StartProcess
from tools.processes.restart_policy import RestartPolicy
from tools.processes.supervisor import Supervisor
from tools.processes.supervisor_phases import SupervisorPhase

GROUPS = {"a1": "a", "a2": "a", "b1": "b", "c1": "c", "c2": "c"}
CHILDREN = ["gateway", *GROUPS]
EVENTS = 400
START_TIMEOUT_S, DRAIN_S = 60.0, 30.0


class SupervisedServer:
    """The processes of one server: they end some time after a signal, or by themselves.

    ending   signalled child -> its exit code
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.code: int | None = None
        unloaded = {"c1", "c2"} if self.random.random() < 0.5 else set()
        self.supervisor = Supervisor(
            CHILDREN,
            0.0,
            start_timeout_s=START_TIMEOUT_S,
            drain_s=DRAIN_S,
            restarts=RestartPolicy(self.random.choice((0, 3))),
            groups=GROUPS,
            replica_restarts=3,
            optional=["c"],
            unloaded=unloaded,
        )
        self.running = {name for name in CHILDREN if name not in unloaded}
        self.ready: set[str] = set()
        self.ending: dict[str, int] = {}

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert self.code is None, "an action after the end"
            match action:
                case StartProcess(child):
                    assert child not in self.running
                    self.running.add(child)
                case SendSignal(child, number):
                    assert child in self.running
                    polite = ExitCode.OK if number in (SIGTERM, SIGQUIT) else -SIGKILL
                    self.ending[child] = int(polite)
                case EndServer(code):
                    self.code = code
        assert set(self.supervisor.alive) == self.running

    def exit(self, child: str, code: int) -> None:
        others = self.ready - self.ending.keys() - {child}
        had_replica = GROUPS.get(child) in {GROUPS.get(each) for each in others}
        before = self.supervisor.phase
        self.running.discard(child)
        self.ready.discard(child)
        self.ending.pop(child, None)
        self.perform(self.supervisor.on_exit(ProcessExit(child, code), self.now))
        if before is SupervisorPhase.SERVING and (had_replica or GROUPS.get(child) == "c"):
            assert self.supervisor.phase is SupervisorPhase.SERVING

    def step(self) -> None:
        """Let one random thing happen."""
        self.now += self.random.choice((0.0, 0.3, 2.0, 31.0))
        if self.random.random() < 0.8:
            self.perform(self.supervisor.tick(self.now))
        alive = sorted(self.running)
        match self.random.randrange(8):
            case 0 | 1 | 2 if alive and self.code is None:
                some = self.random.sample(alive, self.random.randint(1, len(alive)))
                self.ready.update(some)
                self.perform(self.supervisor.on_ready(some, is_ready=self.random.random() < 0.8))
            case 3 if self.ending:
                child = self.random.choice(sorted(self.ending))
                self.exit(child, self.ending[child])
            case 4 if alive and self.random.random() < 0.05:
                self.exit(self.random.choice(alive), self.random.choice((-SIGKILL, 3, 0)))
            case 5:
                self.perform(self.supervisor.start(self.random.choice(list(GROUPS)), self.now))
            case 6:
                child = self.random.choice(list(GROUPS))
                comes_back = self.random.random() < 0.5
                self.perform(self.supervisor.retire(child, self.now, comes_back=comes_back))
            case 7 if self.random.random() < 0.01:
                self.perform(self.supervisor.on_signal(SIGTERM, self.now))

    def finish(self) -> None:
        """Stop the server, and check that it ends after its processes have ended."""
        for _ in range(3):
            if self.code is None:
                self.now += 1.0
                self.perform(self.supervisor.on_signal(SIGTERM, self.now))
        while self.ending:
            child, code = self.ending.popitem()
            self.exit(child, code)
        assert self.code is not None
        assert not self.running
        assert self.supervisor.deadline is None


@pytest.mark.parametrize("seed", range(examples(100, 2000)))
def test_a_supervisor_survives_everything(seed: int) -> None:
    server = SupervisedServer(seed)
    for _ in range(EVENTS):
        if server.code is None:
            server.step()
    server.finish()
