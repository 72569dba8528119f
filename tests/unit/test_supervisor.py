"""The supervisor's actions on failures, drains and repeated signals."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGQUIT, SIGTERM
from typing import Any

import pytest

from protocol.process.exit_codes import ExitCode
from tools.processes.actions import (
    Action,
    EndServer,
    KillProcess,
    LogAction,
    ProcessExit,
    SendSignal,
    StartProcess,
    StoppedProcess,
)
from tools.processes.children import last_error_line
from tools.processes.restart_policy import MAX_DELAY_S, WINDOW_S, RestartPolicy
from tools.processes.supervisor import (
    GRACE_S,
    SAME_SIGNAL_S,
    STOP_S,
    STOPPED_S,
    UNUSED_STOP_S,
    Supervisor,
)
from tools.processes.supervisor_phases import SUPERVISOR_MACHINE, SupervisorEvent, SupervisorPhase

DRAIN_S = 30.0


def starting(max_restarts: int = 0) -> Supervisor:
    return Supervisor(
        ["gateway", "engine"],
        0.0,
        start_timeout_s=60.0,
        drain_s=DRAIN_S,
        restarts=RestartPolicy(max_restarts),
        restarts_children=["gateway"],
    )


def serving(max_restarts: int = 0) -> Supervisor:
    supervisor = starting(max_restarts)
    assert supervisor.on_ready() == []
    return supervisor


def no_logs(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, LogAction)]


def complaints(actions: list[Action]) -> list[str]:
    return [
        action.text for action in actions if isinstance(action, LogAction) and action.is_failure
    ]


@pytest.mark.parametrize("made", [starting, serving])
@pytest.mark.parametrize("code", [1, -SIGKILL])
def test_a_child_that_exits_by_itself_ends_the_others(made, code: int) -> None:
    supervisor = made()
    exit = ProcessExit("engine", code, "out of memory", ExitCode.OUT_OF_MEMORY)
    actions = supervisor.on_exit(exit, 5.0)
    assert no_logs(actions) == [SendSignal("gateway", SIGQUIT)]
    assert complaints(actions) == [exit.cause]
    wanted = 128 + SIGKILL if code < 0 else ExitCode.OUT_OF_MEMORY
    assert supervisor.on_exit(ProcessExit("gateway", 0), 6.0) == [EndServer(wanted)]


def test_a_failure_ends_all_others_at_once_so_that_each_can_send_its_clients_an_error() -> None:
    names = ["gateway", "decode engine", "prefill engine"]
    supervisor = Supervisor(names, 0.0, start_timeout_s=60.0, drain_s=DRAIN_S)
    supervisor.on_ready()
    actions = supervisor.on_exit(ProcessExit("prefill engine", -SIGKILL), 5.0)
    assert no_logs(actions) == [
        SendSignal("gateway", SIGQUIT),
        SendSignal("decode engine", SIGQUIT),
    ]


@pytest.mark.parametrize("made", [starting, serving])
def test_sigquit_stops_all_children_as_a_failure_does(made) -> None:
    """The starter of `tidegate engine` has ended. Clients get an error, and go elsewhere."""
    supervisor = made()
    actions = supervisor.on_signal(SIGQUIT, 5.0)
    stopped = [SendSignal("gateway", SIGQUIT), SendSignal("engine", SIGQUIT)]
    assert no_logs(actions) == stopped
    assert len(complaints(actions)) == 1
    assert supervisor.on_signal(SIGQUIT, 5.0) == []
    supervisor.on_exit(ProcessExit("gateway", 0), 5.1)
    assert supervisor.on_exit(ProcessExit("engine", 0), 5.1) == [EndServer(128 + SIGQUIT)]


def test_only_the_first_cause_is_reported() -> None:
    supervisor = serving()
    supervisor.on_exit(ProcessExit("engine", 1), 5.0)
    assert supervisor.on_exit(ProcessExit("gateway", 3, "engine lost"), 5.1) == [EndServer(1)]


@pytest.mark.parametrize(("made", "stop_s"), [(serving, STOP_S), (starting, UNUSED_STOP_S)])
def test_a_child_that_does_not_stop_after_a_failure_is_killed(made, stop_s: float) -> None:
    """The limit is shorter if the server was never ready."""
    supervisor = made()
    supervisor.on_exit(ProcessExit("engine", 1), 5.0)
    assert supervisor.tick(5.0 + stop_s - 0.1) == []
    assert supervisor.tick(5.0 + stop_s) == [SendSignal("gateway", SIGKILL)]
    assert supervisor.on_exit(ProcessExit("gateway", -SIGKILL), 16.0) == [EndServer(1)]


def test_a_server_that_does_not_get_ready_is_given_up() -> None:
    supervisor = starting()
    assert supervisor.tick(59.9) == []
    actions = supervisor.tick(60.0)
    assert no_logs(actions) == [SendSignal("gateway", SIGQUIT), SendSignal("engine", SIGQUIT)]
    assert complaints(actions) == ["not ready after 60 s; --start-timeout-s allows more"]


def test_a_ready_server_has_no_time_limit() -> None:
    supervisor = serving()
    assert supervisor.deadline is None
    assert supervisor.tick(1e9) == []


@pytest.mark.parametrize("made", [starting, serving])
def test_a_drain_stops_the_gateway_then_the_engine_and_ends_well(made) -> None:
    supervisor = made()
    assert no_logs(supervisor.on_signal(SIGTERM, 5.0)) == [SendSignal("gateway", SIGTERM)]
    assert supervisor.deadline == 5.0 + DRAIN_S + GRACE_S
    assert supervisor.on_exit(ProcessExit("gateway", 0), 20.0) == [SendSignal("engine", SIGTERM)]
    assert supervisor.deadline == 20.0 + DRAIN_S + GRACE_S
    assert supervisor.on_exit(ProcessExit("engine", 0), 21.0) == [EndServer(0)]
    assert supervisor.phase is SupervisorPhase.ENDED


def test_a_child_that_dies_of_our_signal_is_no_failure() -> None:
    supervisor = starting()
    supervisor.on_signal(SIGINT, 0.1)
    supervisor.on_exit(ProcessExit("gateway", -SIGTERM), 0.2)
    assert supervisor.on_exit(ProcessExit("engine", -SIGTERM), 0.3) == [EndServer(0)]


def test_a_child_that_fails_while_draining_is_a_failure() -> None:
    supervisor = serving()
    supervisor.on_signal(SIGINT, 5.0)
    actions = supervisor.on_exit(ProcessExit("gateway", 1, "KeyError: 'x'"), 6.0)
    assert no_logs(actions) == [SendSignal("engine", SIGTERM)]
    assert "KeyError: 'x'" in complaints(actions)[0]
    assert supervisor.on_exit(ProcessExit("engine", 0), 7.0) == [EndServer(1)]


def test_an_engine_that_dies_while_the_gateway_drains_is_a_failure_and_the_drain_goes_on() -> None:
    supervisor = serving()
    supervisor.on_signal(SIGINT, 5.0)
    actions = supervisor.on_exit(ProcessExit("engine", -SIGKILL), 6.0)
    assert no_logs(actions) == []
    assert complaints(actions) == ["while stopping, engine was killed by SIGKILL"]
    assert supervisor.deadline == 5.0 + DRAIN_S + GRACE_S
    assert supervisor.on_exit(ProcessExit("gateway", 0), 7.0) == [EndServer(128 + SIGKILL)]


def test_a_second_ctrl_c_kills_all_that_live() -> None:
    supervisor = serving()
    supervisor.on_signal(SIGINT, 5.0)
    both = [SendSignal("gateway", SIGKILL), SendSignal("engine", SIGKILL)]
    assert no_logs(supervisor.on_signal(SIGINT, 6.0)) == both
    assert supervisor.on_signal(SIGINT, 7.0) == []
    assert supervisor.on_exit(ProcessExit("gateway", -SIGKILL), 7.1) == []
    assert supervisor.on_exit(ProcessExit("engine", -SIGKILL), 7.2) == [EndServer(128 + SIGINT)]


def test_the_same_signal_sent_twice_at_once_counts_once() -> None:
    supervisor = serving()
    supervisor.on_signal(SIGTERM, 5.0)
    assert supervisor.on_signal(SIGTERM, 5.0 + SAME_SIGNAL_S / 2) == []
    assert supervisor.phase is SupervisorPhase.DRAINING


def test_a_drain_that_takes_too_long_is_cut_short_and_no_success() -> None:
    supervisor = serving()
    supervisor.on_signal(SIGTERM, 5.0)
    actions = supervisor.tick(5.0 + DRAIN_S + GRACE_S)
    assert no_logs(actions) == [SendSignal("gateway", SIGKILL), SendSignal("engine", SIGKILL)]
    assert complaints(actions) == ["gateway did not stop in time and will be killed"]
    supervisor.on_exit(ProcessExit("gateway", -SIGKILL), 41.0)
    assert supervisor.on_exit(ProcessExit("engine", -SIGKILL), 41.0) == [EndServer(1)]


def test_readiness_that_comes_too_late_changes_nothing() -> None:
    supervisor = starting()
    supervisor.on_signal(SIGTERM, 5.0)
    deadline = supervisor.deadline
    assert supervisor.on_ready() == []
    assert (supervisor.phase, supervisor.deadline) == (SupervisorPhase.DRAINING, deadline)


DRAINED = ProcessExit("engine", 0, "drained, as the client 'drain' asked", ExitCode.ENGINE_LOST)


@pytest.mark.parametrize("made", [starting, serving, lambda: serving(max_restarts=3)])
def test_a_requested_drain_of_an_engine_ends_the_server_well(made) -> None:
    supervisor = made()
    actions = supervisor.on_exit(DRAINED, 5.0)
    message = "engine drained, as the client 'drain' asked; the server stops"
    assert actions == [LogAction(message), SendSignal("gateway", SIGTERM)]
    assert (supervisor.phase, supervisor.deadline) == (
        SupervisorPhase.FOLLOWING,
        5.0 + DRAIN_S + GRACE_S,
    )
    assert supervisor.on_exit(ProcessExit("gateway", 0), 6.0) == [EndServer(ExitCode.OK)]


def test_a_clean_gateway_exit_is_reported_without_its_last_words() -> None:
    supervisor = serving()
    actions = supervisor.on_exit(ProcessExit("gateway", 0, "[ERROR] of an hour ago"), 5.0)
    message = "gateway exited without a signal from its supervisor; the server stops"
    assert actions == [LogAction(message), SendSignal("engine", SIGTERM)]
    assert supervisor.on_exit(ProcessExit("engine", 0), 6.0) == [EndServer(ExitCode.OK)]


def test_the_first_signal_while_others_follow_kills_no_process() -> None:
    supervisor = serving()
    supervisor.on_exit(DRAINED, 5.0)
    assert no_logs(supervisor.on_signal(SIGTERM, 6.0)) == []
    assert supervisor.phase is SupervisorPhase.DRAINING
    assert supervisor.on_exit(ProcessExit("gateway", 0), 7.0) == [EndServer(ExitCode.OK)]


def test_a_child_that_does_not_drain_in_time_is_killed() -> None:
    supervisor = serving()
    supervisor.on_exit(DRAINED, 5.0)
    assert no_logs(supervisor.tick(5.0 + DRAIN_S + GRACE_S)) == [SendSignal("gateway", SIGKILL)]
    assert supervisor.on_exit(ProcessExit("gateway", -SIGKILL), 41.0) == [
        EndServer(ExitCode.FAILED)
    ]


def test_an_engine_that_drains_while_another_is_away_does_not_wait_for_it() -> None:
    supervisor = restarted(5.0)
    supervisor.on_exit(KILLED, 6.0)
    assert no_logs(supervisor.on_exit(ProcessExit("gateway", 0), 6.5)) == [EndServer(ExitCode.OK)]


def test_the_cause_is_one_line_with_name_code_and_last_words() -> None:
    assert (
        ProcessExit("engine", 3, "no such file").cause == "engine exited with code 3: no such file"
    )
    assert ProcessExit("gateway", -9).cause == "gateway was killed by SIGKILL"


KILLED = ProcessExit("engine", -SIGKILL)


def restarted(at: float = 5.0) -> Supervisor:
    """Return a supervisor whose engine has died once and is running again."""
    supervisor = serving(max_restarts=3)
    assert no_logs(supervisor.on_exit(KILLED, at)) == [StartProcess("engine")]
    return supervisor


def test_an_engine_that_dies_is_started_again_at_once_and_the_gateway_is_left_alone() -> None:
    supervisor = restarted(5.0)
    assert (supervisor.phase, supervisor.alive) == (
        SupervisorPhase.RESTARTING,
        ["gateway", "engine"],
    )
    assert supervisor.deadline == 5.0 + 60.0
    assert supervisor.on_ready() == []
    state: Any = supervisor.phase, supervisor.deadline
    assert state == (SupervisorPhase.SERVING, None)


def test_the_second_restart_waits_and_each_one_after_it_twice_as_long() -> None:
    supervisor = restarted(5.0)
    supervisor.on_ready()
    actions = supervisor.on_exit(KILLED, 6.0)
    assert no_logs(actions) == []
    assert "in 1 s (restart 2 of at most 3" in complaints(actions)[0]
    assert supervisor.deadline == 7.0
    assert supervisor.on_ready() == []
    assert supervisor.phase is SupervisorPhase.RESTARTING, "the old one may still have looked ready"
    assert supervisor.tick(6.9) == []
    assert supervisor.tick(7.0) == [StartProcess("engine")]
    assert supervisor.on_exit(KILLED, 8.0)
    assert supervisor.deadline == 10.0


def test_more_deaths_than_the_limit_end_the_server_with_the_last_cause() -> None:
    supervisor = restarted(5.0)
    for now in (6.0, 10.0):
        supervisor.on_exit(KILLED, now)
        supervisor.tick(now + MAX_DELAY_S)
    actions = supervisor.on_exit(KILLED, 50.0)
    assert no_logs(actions) == [SendSignal("gateway", SIGQUIT)]
    assert complaints(actions) == ["engine was killed by SIGKILL; 3 restarts did not help"]
    assert supervisor.on_exit(ProcessExit("gateway", 0), 51.0) == [EndServer(128 + SIGKILL)]


def test_deaths_of_long_ago_do_not_count() -> None:
    restarts = RestartPolicy(1)
    assert restarts.delay(ExitCode.ENGINE_LOST, 1, 0.0) == 0.0
    assert restarts.delay(ExitCode.ENGINE_LOST, 1, WINDOW_S) is None
    assert restarts.delay(ExitCode.ENGINE_LOST, 1, WINDOW_S + 1) == 0.0


@pytest.mark.parametrize(
    ("server_code", "code"), [(ExitCode.BAD_MODEL, 5), (ExitCode.USAGE, 2), (ExitCode.IN_USE, 6)]
)
def test_a_failure_that_a_restart_cannot_fix_is_not_restarted(server_code: int, code: int) -> None:
    supervisor = serving(max_restarts=3)
    actions = supervisor.on_exit(ProcessExit("engine", code, "", server_code), 5.0)
    assert no_logs(actions) == [SendSignal("gateway", SIGQUIT)]


def test_a_child_that_never_was_ready_is_not_restarted() -> None:
    assert no_logs(starting(3).on_exit(KILLED, 5.0)) == [SendSignal("gateway", SIGQUIT)]


def test_a_restart_that_does_not_get_ready_is_given_up() -> None:
    supervisor = restarted(5.0)
    assert complaints(supervisor.tick(65.0)) == [
        "not ready after 60 s; --start-timeout-s allows more"
    ]
    supervisor.on_exit(ProcessExit("gateway", 0), 66.0)
    assert supervisor.on_exit(ProcessExit("engine", 0), 66.0) == [EndServer(ExitCode.NOT_READY)]


def test_a_drain_while_a_child_is_away_does_not_wait_for_it() -> None:
    supervisor = restarted(5.0)
    supervisor.on_exit(KILLED, 6.0)
    assert no_logs(supervisor.on_signal(SIGTERM, 6.5)) == [SendSignal("gateway", SIGTERM)]
    assert supervisor.tick(8.0) == []
    assert supervisor.on_exit(ProcessExit("gateway", 0), 9.0) == [EndServer(0)]


def test_a_supervisor_that_waits_for_a_restart_does_not_end() -> None:
    supervisor = Supervisor(
        ["engine"], 0.0, start_timeout_s=60, drain_s=DRAIN_S, restarts=RestartPolicy(2)
    )
    supervisor.on_ready()
    supervisor.on_exit(KILLED, 5.0)
    assert no_logs(supervisor.on_exit(KILLED, 6.0)) == []
    assert no_logs(supervisor.on_signal(SIGTERM, 6.5)) == [EndServer(0)]


STOPPED_WORKER = StoppedProcess("gateway", 12, is_child=False)
STOPPED_ENGINE = StoppedProcess("engine", 13, is_child=True)


def test_a_stopped_gateway_process_is_killed_for_its_master_starts_another() -> None:
    supervisor = serving()
    assert supervisor.on_stopped([STOPPED_WORKER], 5.0) == []
    assert supervisor.on_stopped([], 6.0) == []
    assert supervisor.on_stopped([STOPPED_WORKER], 7.0) == []
    assert supervisor.on_stopped([STOPPED_WORKER], 7.0 + STOPPED_S - 0.1) == []
    actions = supervisor.on_stopped([STOPPED_WORKER], 7.0 + STOPPED_S)
    assert no_logs(actions) == [KillProcess("gateway", 12)]


def test_a_stopped_engine_is_killed_only_if_it_is_restarted() -> None:
    for max_restarts, wanted in ((0, []), (3, [KillProcess("engine", 13)])):
        supervisor = serving(max_restarts)
        supervisor.on_stopped([STOPPED_ENGINE], 5.0)
        assert no_logs(supervisor.on_stopped([STOPPED_ENGINE], 5.0 + STOPPED_S)) == wanted


def test_every_phase_but_the_last_can_be_left_and_the_last_only_without_children() -> None:
    assert SUPERVISOR_MACHINE.final == {SupervisorPhase.ENDED}
    rows = SUPERVISOR_MACHINE.rows.items()
    ends = {pair for pair, phase in rows if phase is SupervisorPhase.ENDED}
    last = (
        SupervisorPhase.FOLLOWING,
        SupervisorPhase.DRAINING,
        SupervisorPhase.STOPPING,
        SupervisorPhase.KILLING,
    )
    assert ends == {(phase, SupervisorEvent.ALL_EXITED) for phase in last}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["Traceback (most recent call last):", '  File "x"', "ValueError: no"], "ValueError: no"),
        (["12:00 ERROR engine: no memory", "12:01 INFO bye"], "12:00 ERROR engine: no memory"),
        (["starting", "  Killed  ", ""], "Killed"),
        (["python: No module named gunicorn"], "python: No module named gunicorn"),
        ([], ""),
    ],
)
def test_the_last_words_are_the_last_error_or_else_the_last_line(
    lines: list[str], words: str
) -> None:
    assert last_error_line(lines) == words
