"""Which models are loaded: room, the queue, idle models, failures, confirmations."""

from __future__ import annotations

import pytest

from protocol.tools.control import ReportUse
from protocol.tools.start_facts import GIB
from tools.processes.fleet import (
    RETRY_S,
    SILENT_S,
    DrainModel,
    Fleet,
    FleetLimits,
    LoadModel,
    ModelRefused,
)
from tools.processes.model_phases import MODEL_MACHINE, REPORTED_STATE, ModelPhase

MODELS = {"a": 4 * GIB, "b": 4 * GIB, "c": 8 * GIB}
GATEWAY = 1


class FleetBench:
    """A fleet with one gateway, which confirms each state at once."""

    def __init__(
        self, *loaded: str, memory: int = 0, max_loaded: int = 0, idle_unload_s: float = 0.0
    ) -> None:
        limits = FleetLimits(
            memory_bytes=memory * GIB, max_loaded=max_loaded, idle_unload_s=idle_unload_s
        )
        self.fleet = Fleet(MODELS, limits, 0.0, loaded=loaded)
        for name in loaded:
            assert self.fleet.on_ready(name, 0.0) == []
        assert self.report(0.0) == []

    def report(self, now: float, kept: dict[str, int] | None = None, **open: int) -> list[object]:
        report = ReportUse(open=open, kept=kept or {}, version=self.fleet.version)
        return [*self.fleet.on_report(GATEWAY, report, now)]

    def states(self) -> dict[str, str]:
        return {each.name: each.state for each in self.fleet.states().models}

    def load(self, name: str, now: float, load_s: float = 1.0) -> None:
        assert LoadModel(name) in self.fleet.on_request(name, now)
        self.fleet.on_ready(name, now + load_s)


def test_a_requested_model_is_loaded_if_there_is_room() -> None:
    bench = FleetBench("a", memory=8)
    assert bench.fleet.on_request("b", 1.0) == [LoadModel("b")]
    assert bench.fleet.on_request("b", 1.5) == []
    bench.fleet.on_ready("b", 2.0)
    states = bench.fleet.states()
    assert bench.states() == {"a": "ready", "b": "ready", "c": "unloaded"}
    assert (states.used_bytes, states.limit_bytes) == (8 * GIB, 8 * GIB)


def test_the_least_recently_used_idle_model_makes_room_after_the_gateways_confirm() -> None:
    bench = FleetBench("a", "b", max_loaded=2)
    bench.report(1.0, b=1)
    bench.report(2.0, a=1)
    bench.report(3.0, a=0)
    assert bench.fleet.on_request("c", 4.0) == []
    assert bench.states() == {"a": "ready", "b": "stopping", "c": "waiting"}
    assert bench.report(4.1) == [DrainModel("b")]
    assert bench.fleet.on_exit("b", "", 5.0) == [LoadModel("c")]
    assert bench.states() == {"a": "ready", "b": "unloaded", "c": "loading"}


def test_a_report_from_before_the_change_confirms_nothing() -> None:
    bench = FleetBench("a", max_loaded=1)
    before = ReportUse(open={}, version=bench.fleet.version)
    bench.fleet.on_request("b", 1.0)
    assert bench.fleet.on_report(GATEWAY, before, 1.1) == []
    assert bench.report(1.2) == [DrainModel("a")]


def test_an_idle_model_makes_room_before_a_busy_one_that_was_used_earlier() -> None:
    bench = FleetBench("a", "b", max_loaded=2)
    bench.report(1.0, a=1, b=0)
    bench.fleet.on_request("c", 2.0)
    assert bench.states()["b"] == "stopping"


def test_a_busy_model_makes_room_after_serving_as_long_as_its_load_took() -> None:
    bench = FleetBench(max_loaded=1)
    bench.load("a", 10.0, load_s=5.0)
    bench.report(15.5, a=1)
    bench.fleet.on_request("b", 16.0)
    assert bench.states() == {"a": "ready", "b": "waiting", "c": "unloaded"}
    assert bench.fleet.states().models[1].waits_for == ["a"]
    assert bench.fleet.deadline == 20.0
    assert bench.fleet.tick(20.0) == []
    assert bench.states()["a"] == "stopping"
    assert bench.report(21.0, a=1) == [], "its request is still open"
    assert bench.report(22.0, a=0) == [DrainModel("a")]


def test_models_that_cannot_make_enough_room_yet_make_none() -> None:
    bench = FleetBench("a", memory=8)
    bench.fleet.on_request("b", 1.0)
    bench.fleet.on_request("c", 2.0)
    assert bench.states() == {"a": "ready", "b": "loading", "c": "waiting"}
    bench.fleet.on_ready("b", 3.0)
    assert bench.states() == {"a": "stopping", "b": "stopping", "c": "waiting"}


def test_only_as_many_models_make_room_as_are_needed() -> None:
    bench = FleetBench("a", "b", memory=12)
    bench.report(1.0, a=0)
    bench.fleet.on_request("c", 2.0)
    assert bench.states() == {"a": "ready", "b": "stopping", "c": "waiting"}


def test_a_model_that_is_requested_while_it_makes_room_waits_behind_the_other() -> None:
    bench = FleetBench("a", max_loaded=1)
    bench.fleet.on_request("b", 1.0)
    assert bench.fleet.on_request("a", 1.1, GATEWAY) == []
    assert bench.report(1.2, kept={"a": 1}) == [DrainModel("a")]
    assert bench.fleet.on_exit("a", "", 2.0) == [LoadModel("b")]
    assert bench.states() == {"a": "waiting", "b": "loading", "c": "unloaded"}


def test_a_model_in_use_stays_if_the_other_is_not_needed_any_more() -> None:
    bench = FleetBench("a", max_loaded=1)
    bench.fleet.on_request("b", 1.0)
    bench.fleet.on_request("a", 1.1, GATEWAY)
    assert bench.fleet.on_stop("b", 1.2) == []
    assert bench.states() == {"a": "ready", "b": "unloaded", "c": "unloaded"}


def test_a_request_from_a_gateway_keeps_a_new_model_until_its_next_report() -> None:
    bench = FleetBench(max_loaded=1)
    assert bench.fleet.on_request("a", 1.0, GATEWAY) == [LoadModel("a")]
    bench.fleet.on_ready("a", 2.0)
    bench.fleet.on_request("b", 2.1)
    assert bench.states()["a"] == "ready"
    bench.report(2.2, a=0)
    assert bench.states()["a"] == "stopping"


def test_requests_that_are_kept_keep_their_model_busy() -> None:
    bench = FleetBench(max_loaded=1)
    bench.load("a", 1.0, load_s=10.0)
    bench.report(11.0, kept={"a": 1})
    bench.fleet.on_request("b", 11.1)
    assert bench.states()["a"] == "ready"


def test_an_idle_model_is_unloaded_and_revived_by_a_request_in_time() -> None:
    bench = FleetBench("a", idle_unload_s=60.0)
    bench.report(10.0, a=1)
    assert bench.fleet.deadline is None, "a model with open requests is not idle"
    bench.report(11.0, a=0)
    assert bench.fleet.deadline == 71.0
    assert bench.report(70.9) == []
    assert bench.states()["a"] == "ready"
    bench.fleet.tick(71.0)
    assert bench.states()["a"] == "stopping"
    bench.fleet.on_request("a", 71.1, GATEWAY)
    assert bench.states()["a"] == "ready"
    bench.report(72.0, a=0)
    bench.report(131.0)
    bench.fleet.tick(132.0)
    assert bench.report(132.1) == [DrainModel("a")]
    bench.fleet.on_exit("a", "", 133.0)
    assert bench.states()["a"] == "unloaded"


def test_a_model_that_never_fits_is_refused_with_numbers() -> None:
    bench = FleetBench("a", memory=6)
    with pytest.raises(ModelRefused, match=r"model c needs 8.0 GiB; all models together may use 6"):
        bench.fleet.on_request("c", 1.0)
    with pytest.raises(ModelRefused, match="no model is named x; served: a, b, c"):
        bench.fleet.on_request("x", 1.0)


def test_a_failed_load_is_not_repeated_at_once() -> None:
    bench = FleetBench()
    bench.fleet.on_request("a", 1.0)
    bench.fleet.on_exit("a", "a exited with code 3", 2.0)
    (state, *_) = bench.fleet.states().models
    assert (state.state, state.error) == ("failed", "a exited with code 3")
    with pytest.raises(ModelRefused, match=r"a exited with code 3; the next attempt .* in 9 s"):
        bench.fleet.on_request("a", 3.0)
    assert bench.fleet.on_request("a", 2.0 + RETRY_S) == [LoadModel("a")]
    assert bench.fleet.states().models[0].error == ""


def test_a_model_that_failed_after_serving_is_loaded_again_at_once() -> None:
    bench = FleetBench("a")
    bench.fleet.on_exit("a", "a was killed by SIGKILL", 5.0)
    assert bench.states()["a"] == "failed"
    assert bench.fleet.on_request("a", 5.1) == [LoadModel("a")]


def test_a_restart_of_its_last_engine_makes_a_model_load() -> None:
    bench = FleetBench("a")
    bench.fleet.on_lost("a", 5.0)
    assert bench.states()["a"] == "loading"
    bench.fleet.on_ready("a", 6.0)
    assert bench.states()["a"] == "ready"


def test_a_stopped_model_finishes_its_requests_and_is_loaded_by_the_next_one() -> None:
    bench = FleetBench("a")
    bench.report(1.0, a=1)
    assert bench.fleet.on_stop("a", 2.0) == []
    assert bench.states()["a"] == "stopping"
    bench.fleet.on_request("a", 2.5, GATEWAY)
    assert bench.report(3.0, a=1, kept={"a": 1}) == []
    assert bench.report(4.0, a=0, kept={"a": 1}) == [DrainModel("a")]
    assert bench.fleet.on_exit("a", "", 5.0) == [LoadModel("a")]


def test_a_load_can_be_stopped() -> None:
    bench = FleetBench("a")
    bench.fleet.on_request("b", 0.5)
    assert bench.fleet.on_stop("b", 1.0) == []
    assert bench.states()["b"] == "stopping"
    bench.fleet.on_ready("b", 1.1)
    assert bench.report(1.2) == [DrainModel("b")]


def test_a_model_that_waits_can_be_stopped() -> None:
    bench = FleetBench("a", max_loaded=1)
    bench.report(0.5, a=1)
    bench.fleet.on_request("b", 0.5)
    assert bench.fleet.on_stop("b", 1.0) == []
    assert bench.states()["b"] == "unloaded"


def test_a_gateway_that_is_gone_or_silent_delays_nothing() -> None:
    bench = FleetBench("a", "b", max_loaded=2)
    bench.fleet.on_report(2, ReportUse(open={"a": 1, "b": 1}), 0.0)
    bench.fleet.on_stop("a", 1.0)
    assert bench.report(1.0) == []
    assert bench.fleet.on_gateway_lost(2, 2.0) == [DrainModel("a")]
    bench.fleet.on_report(3, ReportUse(open={"b": 1}), 2.0)
    bench.fleet.on_stop("b", 3.0)
    assert bench.report(3.1) == []
    assert bench.fleet.deadline == 2.0 + SILENT_S
    assert bench.fleet.tick(2.0 + SILENT_S) == [DrainModel("b")]


def test_every_phase_is_reported_and_can_be_left() -> None:
    assert set(REPORTED_STATE) == set(ModelPhase)
    assert not MODEL_MACHINE.final
