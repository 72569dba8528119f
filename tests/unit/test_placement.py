"""Where and when engines are placed in a Ray cluster, and what happens to lost ones."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.simulated_ray import SimulatedRay
from tools.cluster.placement import HINT_S, SPREAD_S, SUSPECT_S, EngineLoss, Placement
from tools.cluster.placement_states import PlacementState
from tools.processes.actions import EndServer

ONE, TWO = "engine 1", "engine 2"


def running(cpus: dict[str, float] | None = None, **options: int) -> SimulatedRay:
    """Return a cluster whose engines are all ready."""
    ray = SimulatedRay(cpus or {"a": 8, "b": 8}, **options)
    ray.grant()
    ray.start()
    assert ray.placement.deadline is None, "nothing is pending"
    return ray


def test_engines_are_spread_over_the_nodes() -> None:
    ray = SimulatedRay({"a": 16, "b": 8, "c": 8}, engines=4)
    ray.grant()
    assert ray.nodes() == ["a", "a", "b", "c"]


def test_a_node_that_is_too_small_is_not_asked_for() -> None:
    ray = SimulatedRay({"a": 8, "b": 2}, engines=2)
    ray.grant()
    assert ray.nodes() == ["a", "a"]


def test_engines_share_a_node_if_others_use_the_rest() -> None:
    ray = SimulatedRay({"a": 8, "b": 8})
    ray.cpus["b"] = 2  # of which 6 are used by others, which the list of nodes does not show
    ray.grant()
    assert ray.nodes() == ["a"]
    ray.wait(SPREAD_S)
    ray.grant()
    assert ray.nodes() == ["a", "a"]


def test_only_engines_that_are_ready_are_listed() -> None:
    ray = SimulatedRay({"a": 8, "b": 8})
    ray.grant()
    assert list(ray.listed) == []
    ray.start(TWO)
    assert list(ray.listed) == ["tcp://b:1"]
    ray.start(ONE)
    assert list(ray.listed) == ["tcp://a:1", "tcp://b:1"]
    ray.lose(ONE)
    assert list(ray.listed) == ["tcp://b:1"]


def test_an_engine_of_a_lost_node_is_placed_elsewhere_at_once() -> None:
    ray = running({"a": 8, "b": 8, "c": 8})
    ray.kill_node("a")  # Ray still lists it
    assert ray.grant() == [ONE]
    assert ray.nodes() == ["b", "c"]
    assert ray.logs[-1] == "engine 1 starts on the node c"


def test_a_lost_node_is_avoided_before_ray_knows_that_it_is_dead() -> None:
    ray = running({"a": 8, "b": 4})
    ray.lose(ONE)
    ray.wait(SPREAD_S)
    assert ray.grant() == [], "b is full, and a is avoided"
    ray.wait(SUSPECT_S)
    assert ray.grant() == [ONE]
    assert ray.nodes() == ["a", "b"]


def test_an_actor_whose_death_was_reported_is_replaced_on_its_node() -> None:
    ray = running({"a": 4, "b": 4})
    loss = EngineLoss("its actor died")
    for _ in range(3):
        attempt = ray.placement.attempt(ONE)
        ray.perform(ray.placement.on_lost(ONE, attempt, loss, ray.now))
        ray.wait(SPREAD_S)
        assert ray.grant() == [ONE]
    attempt = ray.placement.attempt(ONE)
    ray.perform(ray.placement.on_lost(ONE, attempt, loss, ray.now))
    assert ray.logs[-1] == "its actor died; 3 restarts did not help; engine 1 stays down"


def test_an_attempt_that_fails_without_a_place_is_repeated_later_each_time() -> None:
    ray = running({"a": 4, "b": 4})
    ray.kill_node("a", is_known=True)
    ray.lose(ONE)
    assert ONE in ray.places, "the first repetition is immediate"
    ray.lose(ONE)
    assert ONE not in ray.places
    ray.wait(1)
    assert ONE in ray.places


def test_a_new_node_gets_the_engine_that_waits() -> None:
    ray = running({"a": 4, "b": 4})
    ray.kill_node("a", is_known=True)
    ray.wait(60)
    assert ray.grant() == []
    ray.cpus["c"] = 4
    ray.report_nodes()
    assert ray.grant() == [ONE]


def test_losses_of_nodes_do_not_count_as_restarts() -> None:
    ray = running({"a": 4, "b": 4})
    for name in "cdefgh":
        ray.cpus[name] = 4
        ray.report_nodes()
        ray.kill_node(next(iter(ray.cpus)))
        ray.grant()
        ray.start()
    assert len(ray.listed) == 2


def test_an_engine_that_fails_again_and_again_is_restarted_later_each_time() -> None:
    ray = running()
    delays = []
    for _ in range(3):
        ray.lose(ONE, code=1)
        before = ray.now
        while ONE not in ray.places:
            ray.wait(0.5)
        delays.append(ray.now - before)
        ray.grant()
        ray.start()
    assert delays == [0, 1, 2]
    ray.lose(ONE, code=1, cause="engine 1 failed")
    assert ray.placement.state(ONE) is PlacementState.STOPPED
    assert ray.logs[-1] == "engine 1 failed; 3 restarts did not help; engine 1 stays down"
    assert ray.end is None
    assert len(ray.listed) == 1


def test_the_launcher_ends_if_no_engine_can_be_restarted() -> None:
    ray = running()
    ray.lose(ONE, code=ExitCode.BAD_MODEL)
    ray.lose(TWO, code=ExitCode.BAD_MODEL, cause="the model is gone")
    assert ray.end == EndServer(ExitCode.BAD_MODEL, "the model is gone")
    assert ray.places == {}


@pytest.mark.parametrize("code", [ExitCode.BAD_MODEL, ExitCode.OUT_OF_MEMORY, -SIGKILL])
def test_a_failure_before_any_engine_is_ready_ends_the_launcher(code: int) -> None:
    ray = SimulatedRay({"a": 8, "b": 8})
    ray.grant()
    ray.lose(ONE, code=code, cause="engine 1 failed")
    assert ray.end == EndServer(code if code > 0 else ExitCode.FAILED, "engine 1 failed")
    assert ray.places == {}, "all places are returned"


@pytest.mark.parametrize("code", [None, ExitCode.IN_USE])
def test_a_lost_node_or_a_taken_port_does_not_end_the_start(code: int | None) -> None:
    ray = SimulatedRay({"a": 8, "b": 8})
    ray.grant()
    ray.lose(ONE, code=code)
    assert ray.end is None
    assert ray.grant() == [ONE]


def test_a_long_wait_is_logged_with_what_is_needed_and_what_is_free() -> None:
    ray = SimulatedRay({"a": 2, "b": 3})
    ray.wait(HINT_S)
    assert ray.logs[0] == (
        "engine 1 waits for a place; it needs CPU 4 on one node; free: CPU 5 of 5, on 2 nodes"
    )
    ray.wait(HINT_S)
    assert len(ray.logs) == 2, "once for each engine"


def test_the_launcher_gives_up_if_the_cluster_has_no_room() -> None:
    ray = SimulatedRay({"a": 2}, start_timeout_s=50.0)
    ray.wait(49)
    assert ray.end is None
    ray.wait(1)
    assert ray.end is not None
    assert ray.end.code == ExitCode.NOT_READY
    assert ray.end.cause == (
        "no place for engine 1 after 50 s; it needs CPU 4 on one node; free: CPU 2 of 2, on 1 "
        "node; "
        "--start-timeout-s allows more"
    )
    assert ray.places == {}


def test_an_engine_may_wait_forever_while_another_one_serves() -> None:
    ray = SimulatedRay({"a": 4})
    ray.grant()
    ray.start()
    ray.wait(10_000)
    assert ray.end is None
    ray.cpus["b"] = 4
    ray.report_nodes()
    assert ray.grant() == [TWO]


def test_an_engine_that_is_not_ready_in_time_is_replaced() -> None:
    ray = running(start_timeout_s=50)
    ray.lose(ONE)
    ray.grant()
    ray.wait(50)
    assert "engine 1 was not ready after 50 s" in ray.logs[-1]
    assert ray.grant() == [ONE]


def test_reports_of_an_earlier_attempt_are_ignored() -> None:
    ray = running()
    attempt = ray.placement.attempt(ONE)
    ray.lose(ONE)
    ray.grant()
    ray.perform(ray.placement.on_ready(ONE, attempt, "tcp://old:1", ray.now))
    assert ray.placement.state(ONE) is PlacementState.STARTING
    assert ray.listed == ("tcp://b:1",)


def test_a_stop_drains_engines_and_then_returns_their_places() -> None:
    ray = running()
    ray.stop()
    assert [place.drains for place in ray.places.values()] == [True, True]
    ray.lose(ONE, code=-SIGTERM)
    assert ray.end is None
    ray.lose(TWO, code=0)
    assert ray.end == EndServer(0, "")
    assert ray.places == {}


def test_a_stop_ends_at_once_if_no_engine_has_a_place() -> None:
    ray = SimulatedRay({"a": 2})
    ray.stop()
    assert ray.end == EndServer(0, "")
    assert ray.places == {}


def test_an_engine_that_does_not_drain_is_killed() -> None:
    ray = running()
    ray.stop()
    ray.lose(TWO, code=0)
    ray.wait(60)
    assert ray.end == EndServer(ExitCode.FAILED, "")
    assert ray.end.cause == "engine 1 did not stop in time and will be killed"


def test_sigquit_returns_all_places_at_once() -> None:
    ray = running()
    ray.stop(at_once=True)
    assert ray.end == EndServer(0, "")
    assert ray.places == {}


def test_an_engine_that_is_lost_in_a_drain_is_not_placed_again() -> None:
    ray = running()
    ray.stop()
    ray.kill_node("a", is_known=True)
    ray.lose(TWO, code=1, cause="engine 2 failed")
    assert ray.end == EndServer(0, "")
    assert ray.logs[-1] == "while stopping, engine 2 failed"


def test_a_placement_without_pending_work_needs_no_call() -> None:
    placement = Placement(
        [ONE], {"CPU": 1.0}, 0.0, start_timeout_s=5.0, drain_s=1.0, restart_limit=1
    )
    assert placement.deadline == 5.0, "it gives up then"
