"""The supervisor's answers on the control socket, without sockets and processes."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from protocol.tools.control import (
    ControlError,
    FromSupervisor,
    GetModels,
    ModelStates,
    ReportUse,
    RollEnded,
    RollEngines,
    RollProgress,
    StartModel,
    StopModel,
    ToSupervisor,
)
from tools.processes.actions import Action, ProcessExit, SendReply, SendSignal, StartProcess
from tools.processes.control_service import ControlService
from tools.processes.fleet import Fleet, FleetLimits
from tools.processes.restart_policy import RestartPolicy
from tools.processes.supervisor import Supervisor
from tools.processes.supervisor_phases import SupervisorPhase

GROUPS = {"a 1": "a", "a 2": "a", "b": "b"}
GATEWAY, COMMAND = 1, 2


class ServiceBench:
    """A server with the models a, which has two engines, and b, which is not loaded."""

    def __init__(
        self, *, max_loaded: int = 2, max_restarts: int = 0, has_fleet: bool = True
    ) -> None:
        limits = FleetLimits(max_loaded=max_loaded)
        fleet = (
            Fleet(dict.fromkeys("ab", 1 << 30), limits, 0.0, loaded=["a"]) if has_fleet else None
        )
        self.supervisor = Supervisor(
            ["gateway", *GROUPS],
            0.0,
            start_timeout_s=60.0,
            drain_s=30.0,
            restarts=RestartPolicy(max_restarts),
            groups=GROUPS,
            replica_restarts=1,
            optional="ab" if has_fleet else "",
            unloaded=["b"],
        )
        self.control = ControlService(self.supervisor, GROUPS, fleet=fleet, timeout_s=60.0)
        self.replies: dict[int, list[FromSupervisor]] = {GATEWAY: [], COMMAND: []}
        self.done: list[Action] = []
        self.now = 0.0
        self.ready("gateway", "a 1", "a 2")

    def perform(self, actions: list[Action]) -> list[Action]:
        """Collect replies, and return the other actions except log lines."""
        everything = [*actions, *self.control.advance(self.now)]
        for action in everything:
            if isinstance(action, SendReply):
                self.replies[action.connection].append(action.message)
        return [each for each in everything if isinstance(each, StartProcess | SendSignal)]

    def ready(self, *children: str) -> list[Action]:
        return self.perform(self.supervisor.on_ready(children))

    def exit(self, child: str, code: int = 0) -> list[Action]:
        return self.perform(self.supervisor.on_exit(ProcessExit(child, code), self.now))

    def send(self, request: ToSupervisor, connection: int = COMMAND) -> list[Action]:
        return self.perform(self.control.on_request(connection, request, self.now))

    def report(self, **open: int) -> list[Action]:
        version = self.states(GATEWAY).version if self.replies[GATEWAY] else 0
        return self.send(ReportUse(open=open, version=version), GATEWAY)

    def states(self, connection: int = COMMAND) -> ModelStates:
        states = self.replies[connection][-1]
        assert isinstance(states, ModelStates)
        return states

    def summary(self, connection: int = COMMAND) -> dict[str, str]:
        return {each.name: each.state for each in self.states(connection).models}


def test_a_gateway_receives_the_states_once_and_after_each_change() -> None:
    bench = ServiceBench()
    bench.report()
    assert bench.summary(GATEWAY) == {"a": "ready", "b": "unloaded"}
    bench.report()
    assert len(bench.replies[GATEWAY]) == 1
    assert bench.send(StartModel(model="b")) == [StartProcess("b")]
    assert bench.summary(GATEWAY) == bench.summary(COMMAND) == {"a": "ready", "b": "loading"}
    bench.ready("b")
    assert bench.summary(GATEWAY) == {"a": "ready", "b": "ready"}
    assert len(bench.replies[COMMAND]) == 1, "a command receives only replies"


def test_a_request_of_a_gateway_has_one_reply() -> None:
    bench = ServiceBench()
    bench.report()
    bench.send(StartModel(model="b"), GATEWAY)
    assert len(bench.replies[GATEWAY]) == 2


def test_all_engines_of_a_model_are_started_and_drained_together() -> None:
    bench = ServiceBench()
    bench.report()
    assert bench.send(StopModel(model="a")) == []
    assert bench.summary(GATEWAY)["a"] == "stopping"
    stops = [SendSignal("a 1", SIGTERM), SendSignal("a 2", SIGTERM)]
    assert bench.report() == stops
    assert bench.exit("a 1") == bench.exit("a 2") == []
    assert bench.summary(GATEWAY)["a"] == "unloaded"
    assert bench.send(StartModel(model="a")) == [StartProcess("a 1"), StartProcess("a 2")]
    bench.ready("a 2")
    assert bench.summary(GATEWAY)["a"] == "ready", "one engine is enough"


def test_a_model_is_loaded_after_another_one_has_made_room() -> None:
    bench = ServiceBench(max_loaded=1)
    bench.report()
    assert bench.send(StartModel(model="b")) == []
    assert bench.summary(GATEWAY) == {"a": "stopping", "b": "waiting"}
    bench.report()
    bench.exit("a 1")
    assert bench.exit("a 2") == [StartProcess("b")]
    assert bench.summary(GATEWAY) == {"a": "unloaded", "b": "loading"}


def test_a_gateway_that_has_disconnected_delays_nothing() -> None:
    bench = ServiceBench(max_loaded=1)
    bench.report(a=1)
    bench.send(StopModel(model="a"))
    assert bench.report(a=1) == []
    actions = bench.perform(bench.control.on_closed(GATEWAY, bench.now))
    assert actions == [SendSignal("a 1", SIGTERM), SendSignal("a 2", SIGTERM)]


def test_a_model_whose_load_fails_is_reported_with_the_cause() -> None:
    bench = ServiceBench()
    bench.report()
    bench.send(StartModel(model="b"))
    bench.exit("b", 3)
    assert bench.states(GATEWAY).models[1].state == "failed"
    assert bench.states(GATEWAY).models[1].error == "b exited with code 3"
    bench.send(StartModel(model="b"))
    reply = bench.replies[COMMAND][-1]
    assert isinstance(reply, ControlError)
    assert reply.model == "b"
    assert bench.supervisor.phase is SupervisorPhase.SERVING


def test_a_model_is_loading_while_its_last_engine_restarts() -> None:
    bench = ServiceBench(max_restarts=1)
    bench.report()
    bench.exit("a 1", -SIGKILL)
    assert bench.summary(GATEWAY)["a"] == "ready"
    bench.exit("a 2", -SIGKILL)
    assert bench.summary(GATEWAY)["a"] == "loading"
    bench.ready("a 1")
    assert bench.summary(GATEWAY)["a"] == "ready"


def test_the_states_can_be_read() -> None:
    bench = ServiceBench()
    bench.send(GetModels())
    assert bench.summary() == {"a": "ready", "b": "unloaded"}
    assert bench.states().used_bytes == 1 << 30


def test_a_server_with_one_model_refuses_to_load_and_unload() -> None:
    bench = ServiceBench(has_fleet=False)
    for request in (StartModel(model="a"), StopModel(model="a"), GetModels()):
        bench.send(request)
        assert isinstance(bench.replies[COMMAND][-1], ControlError)
    bench.report(a=1)
    assert bench.replies[GATEWAY] == []


def test_a_rolling_restart_reports_each_stage_to_the_command_that_started_it() -> None:
    bench = ServiceBench(has_fleet=False)
    assert bench.send(RollEngines()) == [SendSignal("a 1", SIGTERM)]
    assert bench.exit("a 1") == [StartProcess("a 1")]
    assert bench.ready("a 1") == [SendSignal("a 2", SIGTERM)]
    assert bench.exit("a 2") == [StartProcess("a 2")]
    assert bench.ready("a 2") == []
    *progress, end = bench.replies[COMMAND]
    assert [(each.engine, each.stage) for each in progress if isinstance(each, RollProgress)] == [
        (engine, stage) for engine in ("a 1", "a 2") for stage in ("draining", "starting", "ready")
    ]
    assert end == RollEnded()
    assert bench.send(RollEngines()) == [SendSignal("a 1", SIGTERM)], "another one can follow"


def test_a_successor_that_is_not_ready_in_time_ends_the_roll_and_the_server_serves() -> None:
    bench = ServiceBench(has_fleet=False)
    bench.send(RollEngines())
    bench.exit("a 1")
    bench.now = 60.0
    assert bench.perform(bench.supervisor.tick(60.0)) == [SendSignal("a 1", SIGKILL)]
    assert bench.exit("a 1", -SIGKILL) == [StartProcess("a 1")], "it is restarted as any replica"
    assert bench.replies[COMMAND][-1] == RollEnded(error="a 1 was not ready after 60 s")
    assert bench.supervisor.phase is SupervisorPhase.SERVING


def test_only_one_rolling_restart_runs_at_a_time() -> None:
    bench = ServiceBench(has_fleet=False)
    bench.send(RollEngines(), GATEWAY)
    bench.send(RollEngines())
    assert bench.replies[COMMAND] == [ControlError(message="a rolling restart is in progress")]


def test_a_server_that_stops_ends_its_rolling_restart() -> None:
    bench = ServiceBench(has_fleet=False)
    bench.send(RollEngines())
    bench.perform(bench.supervisor.on_signal(SIGTERM, 1.0))
    assert bench.replies[COMMAND][-1] == RollEnded(error="the server stops")
    bench.send(RollEngines())
    assert bench.replies[COMMAND][-1] == ControlError(message="the server is stopping")
