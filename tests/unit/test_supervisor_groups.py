"""The supervisor's actions for groups: replicas, optional models, children that start later."""

from __future__ import annotations

from signal import SIGKILL, SIGQUIT, SIGTERM

from protocol.process.exit_codes import ExitCode
from tests.unit.test_supervisor import DRAIN_S, DRAINED, complaints, no_logs
from tools.processes.actions import (
    EndServer,
    KillProcess,
    LogAction,
    ProcessExit,
    SendSignal,
    StartProcess,
    StoppedProcess,
)
from tools.processes.child_states import CHILD_MACHINE, ChildState
from tools.processes.restart_policy import MAX_DELAY_S, RestartPolicy
from tools.processes.supervisor import STOP_S, STOPPED_S, Supervisor
from tools.processes.supervisor_phases import SupervisorPhase

GATEWAY, FIRST, SECOND = "gateway", "engine 1", "engine 2"
REPLICAS = {FIRST: "engine", SECOND: "engine"}
MODELS = {"a": "model a", "b": "model b"}


def replicas(max_restarts: int = 0, limit: int = 2) -> Supervisor:
    """Return a server with two replicas that are ready."""
    supervisor = Supervisor(
        [GATEWAY, *REPLICAS],
        0.0,
        start_timeout_s=60.0,
        drain_s=DRAIN_S,
        restarts=RestartPolicy(max_restarts),
        restarts_children=[GATEWAY],
        groups=REPLICAS,
        replica_restarts=limit,
    )
    assert supervisor.on_ready() == []
    return supervisor


def models(max_restarts: int = 0) -> Supervisor:
    """Return a server with two optional models: a is ready, and b is not loaded."""
    supervisor = Supervisor(
        [GATEWAY, *MODELS],
        0.0,
        start_timeout_s=60.0,
        drain_s=DRAIN_S,
        restarts=RestartPolicy(max_restarts),
        groups=MODELS,
        replica_restarts=2,
        optional=MODELS.values(),
        unloaded=["b"],
    )
    assert supervisor.on_ready() == []
    return supervisor


def killed(name: str) -> ProcessExit:
    return ProcessExit(name, -SIGKILL, server_code=ExitCode.ENGINE_LOST)


def serves(supervisor: Supervisor) -> bool:
    return supervisor.phase is SupervisorPhase.SERVING


# ---- replicas


def test_a_lost_replica_is_restarted_while_the_server_serves() -> None:
    supervisor = replicas()
    actions = supervisor.on_exit(killed(FIRST), 5.0)
    assert no_logs(actions) == [StartProcess(FIRST)]
    assert complaints(actions) == [
        "engine 1 was killed by SIGKILL; starting it again now (restart 1 of at most 2 in 5 "
        "minutes)"
    ]
    assert serves(supervisor)
    assert supervisor.on_ready([FIRST]) == [LogAction("engine 1 is ready")]
    assert supervisor.deadline is None


def test_a_replica_whose_restarts_are_used_up_stays_down_while_others_serve() -> None:
    supervisor = replicas()
    supervisor.on_exit(killed(FIRST), 5.0)
    supervisor.on_exit(killed(FIRST), 6.0)
    assert supervisor.tick(7.0) == [StartProcess(FIRST)]
    actions = supervisor.on_exit(killed(FIRST), 8.0)
    assert actions == [
        LogAction(
            "engine 1 was killed by SIGKILL; 2 restarts did not help; engine 2 continues",
            is_failure=True,
        )
    ]
    assert serves(supervisor)
    assert supervisor.alive == [GATEWAY, SECOND]
    assert supervisor.failure(FIRST) == "engine 1 was killed by SIGKILL"


def test_the_loss_of_the_last_replica_ends_the_server() -> None:
    supervisor = replicas(limit=1)
    supervisor.on_exit(killed(FIRST), 5.0)
    supervisor.on_exit(killed(FIRST), 6.0)
    actions = supervisor.on_exit(killed(SECOND), 7.0)
    assert no_logs(actions) == [SendSignal(GATEWAY, SIGQUIT)]
    assert supervisor.on_exit(ProcessExit(GATEWAY, 0), 8.0) == [EndServer(128 + SIGKILL)]


def test_the_last_replica_is_restarted_if_the_server_restarts_its_processes() -> None:
    supervisor = replicas(max_restarts=1, limit=1)
    supervisor.on_exit(killed(FIRST), 5.0)
    supervisor.on_exit(killed(FIRST), 6.0)
    assert no_logs(supervisor.on_exit(killed(SECOND), 7.0)) == [StartProcess(SECOND)]
    assert supervisor.phase is SupervisorPhase.RESTARTING
    supervisor.on_ready([GATEWAY])
    assert supervisor.phase is SupervisorPhase.RESTARTING, "only the gateway is ready"
    supervisor.on_ready([SECOND])
    assert serves(supervisor)


def test_two_replicas_that_are_lost_together_both_come_back() -> None:
    supervisor = replicas()
    supervisor.on_exit(killed(FIRST), 5.0)
    supervisor.on_exit(killed(FIRST), 6.0)
    assert no_logs(supervisor.on_exit(killed(SECOND), 6.1)) == [StartProcess(SECOND)]
    assert supervisor.tick(7.0) == [StartProcess(FIRST)]
    supervisor.on_ready([FIRST, SECOND])
    assert supervisor.deadline is None


def test_a_last_replica_that_waits_for_its_restart_has_a_limit_of_its_own() -> None:
    """No phase limits it, because the server was serving when its restart was planned."""
    supervisor = replicas()
    supervisor.on_exit(killed(FIRST), 5.0)
    supervisor.on_exit(killed(FIRST), 6.0)
    bad_model = ProcessExit(SECOND, 5, "bad model", ExitCode.BAD_MODEL)
    assert no_logs(supervisor.on_exit(bad_model, 6.5)) == []
    assert supervisor.tick(7.0) == [StartProcess(FIRST)]
    assert no_logs(supervisor.tick(67.0)) == [SendSignal(FIRST, SIGKILL)]
    actions = supervisor.on_exit(killed(FIRST), 67.1)
    assert complaints(actions) == ["engine 1 was not ready after 60 s"]
    assert no_logs(actions) == [SendSignal(GATEWAY, SIGQUIT)]


def test_a_replica_that_does_not_get_ready_is_killed_and_tried_again() -> None:
    supervisor = replicas()
    supervisor.on_exit(killed(FIRST), 5.0)
    assert supervisor.deadline == 65.0
    actions = supervisor.tick(65.0)
    assert no_logs(actions) == [SendSignal(FIRST, SIGKILL)]
    assert complaints(actions) == ["engine 1 was not ready after 60 s and will be killed"]
    assert complaints(supervisor.on_exit(killed(FIRST), 66.0)) == [
        "engine 1 was not ready after 60 s; starting it again in 1 s (restart 2 of at most 2 in 5 "
        "minutes)"
    ]
    assert serves(supervisor)


def test_a_replica_that_fails_before_the_server_was_ready_ends_it() -> None:
    supervisor = Supervisor(
        [GATEWAY, *REPLICAS], 0.0, start_timeout_s=60.0, drain_s=DRAIN_S, groups=REPLICAS
    )
    actions = no_logs(supervisor.on_exit(killed(FIRST), 5.0))
    assert actions == [SendSignal(GATEWAY, SIGQUIT), SendSignal(SECOND, SIGQUIT)]


def test_a_start_waits_for_all_replicas_so_that_one_that_fails_is_noticed() -> None:
    supervisor = Supervisor(
        [GATEWAY, *REPLICAS], 0.0, start_timeout_s=60.0, drain_s=DRAIN_S, groups=REPLICAS
    )
    assert supervisor.on_ready([GATEWAY, SECOND]) == []
    assert supervisor.phase is SupervisorPhase.STARTING
    assert supervisor.on_ready([FIRST]) == []
    assert serves(supervisor)


def test_a_server_that_refuses_requests_is_not_ready_even_if_an_engine_is() -> None:
    supervisor = Supervisor(
        [GATEWAY, *REPLICAS], 0.0, start_timeout_s=60.0, drain_s=DRAIN_S, groups=REPLICAS
    )
    supervisor.on_ready([GATEWAY, FIRST, SECOND], is_ready=False)
    assert supervisor.phase is SupervisorPhase.STARTING


def test_a_replica_that_is_drained_from_outside_stays_down_and_the_last_one_is_followed() -> None:
    supervisor = replicas()
    drained = ProcessExit(FIRST, 0, DRAINED.reason)
    assert supervisor.on_exit(drained, 5.0) == [
        LogAction(f"engine 1 {DRAINED.reason}; it stays down; engine 2 continues")
    ]
    assert serves(supervisor)
    actions = supervisor.on_exit(ProcessExit(SECOND, 0, DRAINED.reason), 6.0)
    assert no_logs(actions) == [SendSignal(GATEWAY, SIGTERM)]


def test_replicas_are_drained_together_after_the_gateway() -> None:
    supervisor = replicas()
    assert no_logs(supervisor.on_signal(SIGTERM, 5.0)) == [SendSignal(GATEWAY, SIGTERM)]
    both = [SendSignal(FIRST, SIGTERM), SendSignal(SECOND, SIGTERM)]
    assert supervisor.on_exit(ProcessExit(GATEWAY, 0), 6.0) == both
    assert supervisor.on_exit(ProcessExit(SECOND, 0), 7.0) == []
    assert supervisor.on_exit(ProcessExit(FIRST, 0), 7.0) == [EndServer(ExitCode.OK)]


def test_a_stopped_replica_is_killed_because_it_is_replaced() -> None:
    supervisor = replicas()
    stopped = StoppedProcess(FIRST, 13, is_child=True)
    supervisor.on_stopped([stopped], 5.0)
    actions = supervisor.on_stopped([stopped], 5.0 + STOPPED_S)
    assert no_logs(actions) == [KillProcess(FIRST, 13)]


# ---- children that are retired and started while the server runs


def test_a_retired_replica_exits_without_the_server_and_starts_again_on_request() -> None:
    supervisor = replicas()
    assert supervisor.retire(FIRST, 5.0, comes_back=True) == [SendSignal(FIRST, SIGTERM)]
    assert supervisor.on_exit(ProcessExit(FIRST, 0, "drained by a signal"), 6.0) == []
    assert supervisor.start(FIRST, 6.0) == [StartProcess(FIRST)]
    assert supervisor.on_ready([FIRST]) == [LogAction("engine 1 is ready")]
    assert serves(supervisor)


def test_a_replica_is_not_the_last_one_while_another_is_replaced() -> None:
    supervisor = replicas()
    supervisor.retire(FIRST, 5.0, comes_back=True)
    assert no_logs(supervisor.on_exit(killed(SECOND), 5.5)) == [StartProcess(SECOND)]
    assert serves(supervisor)


def test_a_retired_child_that_does_not_drain_in_time_ends_its_requests_and_is_killed() -> None:
    supervisor = replicas()
    supervisor.retire(FIRST, 5.0)
    actions = supervisor.tick(5.0 + DRAIN_S)
    assert actions == [
        LogAction("engine 1 did not finish in 30 s; its open requests are ended"),
        SendSignal(FIRST, SIGQUIT),
    ]
    actions = supervisor.tick(5.0 + DRAIN_S + STOP_S)
    assert no_logs(actions) == [SendSignal(FIRST, SIGKILL)]
    assert complaints(actions) == ["engine 1 did not finish in 30 s and will be killed"]
    assert supervisor.on_exit(killed(FIRST), 41.0) == []
    assert serves(supervisor)


def test_a_retired_child_that_fails_is_reported() -> None:
    supervisor = replicas()
    supervisor.retire(FIRST, 5.0)
    actions = supervisor.on_exit(ProcessExit(FIRST, 3, "KeyError"), 6.0)
    assert actions == [
        LogAction("while stopping, engine 1 exited with code 3: KeyError", is_failure=True)
    ]


def test_a_restart_that_is_not_needed_any_more_is_cancelled() -> None:
    supervisor = replicas()
    supervisor.on_exit(killed(FIRST), 5.0)
    supervisor.on_exit(killed(FIRST), 6.0)
    assert supervisor.retire(FIRST, 6.5) == []
    assert supervisor.state(FIRST) is ChildState.DOWN
    assert supervisor.tick(6.0 + MAX_DELAY_S) == []


def test_a_server_that_stops_does_not_signal_a_retiring_child_again() -> None:
    """An engine stops at once if it receives a second signal."""
    supervisor = replicas()
    supervisor.retire(FIRST, 5.0)
    supervisor.on_signal(SIGTERM, 5.5)
    actions = supervisor.on_exit(ProcessExit(GATEWAY, 0), 6.0)
    assert actions == [SendSignal(SECOND, SIGTERM)]
    assert supervisor.start(FIRST, 6.0) == supervisor.retire(SECOND, 6.0) == []
    assert supervisor.on_exit(ProcessExit(FIRST, 0), 7.0) == []
    assert supervisor.on_exit(ProcessExit(SECOND, 0), 7.0) == [EndServer(ExitCode.OK)]


# ---- optional groups


def test_the_server_outlives_an_optional_model_and_reports_its_failure() -> None:
    supervisor = models()
    actions = supervisor.on_exit(ProcessExit("a", 3, "out of memory"), 5.0)
    message = "a exited with code 3: out of memory; the server continues"
    assert actions == [LogAction(message, is_failure=True)]
    assert serves(supervisor)
    assert supervisor.failure("a") == "a exited with code 3: out of memory"


def test_an_optional_model_is_loaded_and_unloaded_on_request() -> None:
    supervisor = models()
    assert supervisor.start("b", 5.0) == [StartProcess("b")]
    assert supervisor.start("b", 5.0) == []
    supervisor.on_ready(["b"])
    assert supervisor.retire("b", 9.0) == [SendSignal("b", SIGTERM)]
    assert supervisor.on_exit(ProcessExit("b", 0), 10.0) == []
    assert serves(supervisor)
    assert supervisor.deadline is None


def test_an_optional_model_that_does_not_get_ready_is_given_up() -> None:
    supervisor = models()
    supervisor.start("b", 5.0)
    assert no_logs(supervisor.tick(65.0)) == [SendSignal("b", SIGKILL)]
    supervisor.on_exit(killed("b"), 66.0)
    assert supervisor.failure("b") == "b was not ready after 60 s"
    assert supervisor.state("b") is ChildState.DOWN


def test_an_optional_model_is_restarted_if_the_server_restarts_its_processes() -> None:
    supervisor = models(max_restarts=1)
    assert no_logs(supervisor.on_exit(killed("a"), 5.0)) == [StartProcess("a")]
    assert serves(supervisor)


def test_a_gateway_restart_does_not_wait_for_a_model_that_loads() -> None:
    supervisor = models(max_restarts=1)
    supervisor.start("b", 5.0)
    supervisor.on_exit(killed(GATEWAY), 6.0)
    assert supervisor.phase is SupervisorPhase.RESTARTING
    supervisor.on_ready([GATEWAY])
    assert serves(supervisor)
    assert supervisor.deadline == 65.0


def test_models_that_are_loaded_at_the_start_delay_readiness() -> None:
    supervisor = Supervisor(
        [GATEWAY, *MODELS],
        0.0,
        start_timeout_s=60.0,
        drain_s=DRAIN_S,
        groups=MODELS,
        optional=MODELS.values(),
    )
    supervisor.on_ready([GATEWAY, "a"])
    assert supervisor.phase is SupervisorPhase.STARTING
    supervisor.on_ready(["b"])
    assert serves(supervisor)


def test_every_state_of_a_child_can_be_left() -> None:
    assert not CHILD_MACHINE.final
