"""What becomes of a server's processes: failures, drains and impatience, as lists of orders."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from tools.children import last_words
from tools.supervisor import (
    GRACE_S,
    SAME_WISH_S,
    STOP_S,
    UNUSED_STOP_S,
    End,
    Exit,
    Order,
    Phase,
    Say,
    Send,
    Supervisor,
)

DRAIN_S = 30.0


def starting() -> Supervisor:
    return Supervisor(["gateway", "engine"], 0.0, start_timeout_s=60.0, drain_s=DRAIN_S)


def serving() -> Supervisor:
    supervisor = starting()
    assert supervisor.ready() == []
    return supervisor


def deeds(orders: list[Order]) -> list[Order]:
    return [order for order in orders if not isinstance(order, Say)]


def complaints(orders: list[Order]) -> list[str]:
    return [order.text for order in orders if isinstance(order, Say) and order.is_failure]


@pytest.mark.parametrize("made", [starting, serving])
@pytest.mark.parametrize("code", [0, 1, -SIGKILL])
def test_a_child_that_leaves_by_itself_takes_the_others_with_it(made, code: int) -> None:
    supervisor = made()
    orders = supervisor.exited(Exit("engine", code, "out of memory"), 5.0)
    assert deeds(orders) == [Send("gateway", SIGTERM)]
    assert complaints(orders) == [Exit("engine", code, "out of memory").cause]
    assert supervisor.exited(Exit("gateway", 0), 6.0) == [End(1)]


def test_only_the_first_cause_is_told() -> None:
    supervisor = serving()
    supervisor.exited(Exit("engine", 1), 5.0)
    assert supervisor.exited(Exit("gateway", 3, "engine lost"), 5.1) == [End(1)]


def test_who_does_not_stop_after_a_failure_is_killed() -> None:
    supervisor = serving()
    supervisor.exited(Exit("engine", 1), 5.0)
    assert supervisor.tick(5.0 + STOP_S - 0.1) == []
    assert supervisor.tick(5.0 + STOP_S) == [Send("gateway", SIGKILL)]
    assert supervisor.exited(Exit("gateway", -SIGKILL), 16.0) == [End(1)]


def test_nobody_waits_long_for_a_server_that_failed_before_it_was_ready() -> None:
    supervisor = starting()
    supervisor.exited(Exit("engine", 1), 5.0)
    assert supervisor.tick(5.0 + UNUSED_STOP_S) == [Send("gateway", SIGKILL)]


def test_a_server_that_does_not_get_ready_is_given_up() -> None:
    supervisor = starting()
    assert supervisor.tick(59.9) == []
    orders = supervisor.tick(60.0)
    assert deeds(orders) == [Send("gateway", SIGTERM), Send("engine", SIGTERM)]
    assert complaints(orders) == ["not ready after 60 s"]


def test_a_server_that_is_ready_may_run_for_ever() -> None:
    supervisor = serving()
    assert supervisor.deadline is None
    assert supervisor.tick(1e9) == []


@pytest.mark.parametrize("made", [starting, serving])
def test_a_drain_stops_the_gateway_then_the_engine_and_ends_well(made) -> None:
    supervisor = made()
    assert deeds(supervisor.interrupted(SIGTERM, 5.0)) == [Send("gateway", SIGTERM)]
    assert supervisor.deadline == 5.0 + DRAIN_S + GRACE_S
    assert supervisor.exited(Exit("gateway", 0), 20.0) == [Send("engine", SIGTERM)]
    assert supervisor.deadline == 20.0 + DRAIN_S + GRACE_S
    assert supervisor.exited(Exit("engine", 0), 21.0) == [End(0)]
    assert supervisor.phase is Phase.ENDED


def test_a_child_that_dies_of_our_own_signal_has_left_well() -> None:
    supervisor = starting()
    supervisor.interrupted(SIGINT, 0.1)
    supervisor.exited(Exit("gateway", -SIGTERM), 0.2)
    assert supervisor.exited(Exit("engine", -SIGTERM), 0.3) == [End(0)]


def test_a_child_that_breaks_on_the_way_out_is_a_failure() -> None:
    supervisor = serving()
    supervisor.interrupted(SIGINT, 5.0)
    orders = supervisor.exited(Exit("gateway", 1, "KeyError: 'x'"), 6.0)
    assert deeds(orders) == [Send("engine", SIGTERM)]
    assert "KeyError: 'x'" in complaints(orders)[0]
    assert supervisor.exited(Exit("engine", 0), 7.0) == [End(1)]


def test_an_engine_that_dies_while_the_gateway_drains_is_a_failure_and_the_drain_goes_on() -> None:
    supervisor = serving()
    supervisor.interrupted(SIGINT, 5.0)
    orders = supervisor.exited(Exit("engine", -SIGKILL), 6.0)
    assert deeds(orders) == []
    assert complaints(orders) == ["while stopping, engine was killed by SIGKILL"]
    assert supervisor.deadline == 5.0 + DRAIN_S + GRACE_S
    assert supervisor.exited(Exit("gateway", 0), 7.0) == [End(1)]


def test_a_second_ctrl_c_kills_all_that_live() -> None:
    supervisor = serving()
    supervisor.interrupted(SIGINT, 5.0)
    both = [Send("gateway", SIGKILL), Send("engine", SIGKILL)]
    assert deeds(supervisor.interrupted(SIGINT, 6.0)) == both
    assert supervisor.interrupted(SIGINT, 7.0) == []
    assert supervisor.exited(Exit("gateway", -SIGKILL), 7.1) == []
    assert supervisor.exited(Exit("engine", -SIGKILL), 7.2) == [End(128 + SIGINT)]


def test_the_same_signal_sent_twice_at_once_is_one_wish() -> None:
    supervisor = serving()
    supervisor.interrupted(SIGTERM, 5.0)
    assert supervisor.interrupted(SIGTERM, 5.0 + SAME_WISH_S / 2) == []
    assert supervisor.phase is Phase.DRAINING


def test_a_drain_that_takes_too_long_is_cut_short_and_no_success() -> None:
    supervisor = serving()
    supervisor.interrupted(SIGTERM, 5.0)
    orders = supervisor.tick(5.0 + DRAIN_S + GRACE_S)
    assert deeds(orders) == [Send("gateway", SIGKILL), Send("engine", SIGKILL)]
    assert complaints(orders) == ["gateway did not stop in time and will be killed"]
    supervisor.exited(Exit("gateway", -SIGKILL), 41.0)
    assert supervisor.exited(Exit("engine", -SIGKILL), 41.0) == [End(1)]


def test_readiness_that_comes_too_late_changes_nothing() -> None:
    supervisor = starting()
    supervisor.interrupted(SIGTERM, 5.0)
    deadline = supervisor.deadline
    assert supervisor.ready() == []
    assert (supervisor.phase, supervisor.deadline) == (Phase.DRAINING, deadline)


def test_the_cause_is_one_line_with_name_code_and_last_words() -> None:
    assert Exit("engine", 3, "no such file").cause == "engine exited with code 3: no such file"
    assert Exit("gateway", -9).cause == "gateway was killed by SIGKILL"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["Traceback (most recent call last):", '  File "x"', "ValueError: no"], "ValueError: no"),
        (["12:00 ERROR engine: no memory", "12:01 INFO bye"], "12:00 ERROR engine: no memory"),
        (["12:00:00 E engine_core no such model", "12:00:01 I bye"], "no such model"),
        (["starting", "  Killed  ", ""], "Killed"),
        (
            ["the gateway cannot start: no", "[ERROR] Reason: failed"],
            "the gateway cannot start: no",
        ),
        (["python: No module named gunicorn"], "python: No module named gunicorn"),
        ([], ""),
    ],
)
def test_the_last_words_are_the_last_error_or_else_the_last_line(
    lines: list[str], words: str
) -> None:
    assert last_words(lines) == words
