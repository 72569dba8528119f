"""The models of the supervisor as one gateway process sees them."""

from __future__ import annotations

import pytest

from gateway.engine.model_loads import ModelLoads
from protocol.tools.control import (
    ControlError,
    LoadState,
    ModelState,
    ModelStates,
    ReportUse,
    StartModel,
)

NAME = "small"
STATES: tuple[LoadState, ...] = ("unloaded", "waiting", "loading", "ready", "stopping", "failed")


class LoadsBench:
    """The loads of one model, and a supervisor that counts its changes."""

    def __init__(self, *, is_unloaded: bool) -> None:
        self.loads = ModelLoads()
        self.loads.add(NAME, is_unloaded=is_unloaded)
        self.version = 0

    def set(self, state: LoadState, error: str = "", *, is_new: bool = True) -> None:
        self.version += is_new
        models = [ModelState(name=NAME, state=state, error=error)]
        self.loads.on_message(ModelStates(version=self.version, models=models))


def on_demand(*states: LoadState) -> LoadsBench:
    bench = LoadsBench(is_unloaded=True)
    for state in states:
        bench.set(state)
    return bench


def test_a_model_accepts_nothing_before_the_supervisor_has_reported_it() -> None:
    for is_unloaded in (True, False):
        assert not LoadsBench(is_unloaded=is_unloaded).loads.accepts(NAME)


@pytest.mark.parametrize("state", STATES)
def test_a_model_that_is_loaded_on_demand_accepts_requests_only_if_it_is_ready(
    state: LoadState,
) -> None:
    assert on_demand(state).loads.accepts(NAME) == (state == "ready")


def test_the_first_load_of_a_server_keeps_no_requests_but_later_ones_do() -> None:
    bench = LoadsBench(is_unloaded=False)
    bench.set("loading")
    assert bench.loads.accepts(NAME)
    assert not bench.loads.keeps_requests(NAME)
    bench.set("ready")
    assert not bench.loads.keeps_requests(NAME)
    bench.set("stopping")
    bench.set("loading")
    assert not bench.loads.accepts(NAME)
    assert bench.loads.keeps_requests(NAME)


@pytest.mark.parametrize("state", ["unloaded", "waiting", "stopping", "failed"])
def test_a_load_is_requested_once_until_the_state_changes(state: LoadState) -> None:
    bench = on_demand("ready", state)
    assert bench.loads.start(NAME) == StartModel(model=NAME)
    assert bench.loads.start(NAME) is None
    bench.set(state, is_new=False)  # the reply to the message
    assert bench.loads.start(NAME) is None
    bench.set("loading")
    assert bench.loads.start(NAME) is None
    bench.set("unloaded")
    assert bench.loads.start(NAME) == StartModel(model=NAME)


@pytest.mark.parametrize("state", ["unloaded", "failed"])
def test_a_load_is_requested_again_if_it_may_have_been_given_up_meanwhile(state: LoadState) -> None:
    bench = on_demand("ready", state)
    bench.loads.start(NAME)
    bench.set(state)
    assert bench.loads.start(NAME) is not None


@pytest.mark.parametrize(
    ("states", "have_exited"),
    [
        (("ready", "stopping"), False),
        (("ready", "stopping", "unloaded"), True),
        (("ready", "stopping", "waiting"), True),
        (("ready", "stopping", "loading"), True),  # it was needed again at once
        (("ready", "stopping", "ready"), False),  # its room was not needed any more
        (("ready", "failed"), True),
        (("ready", "loading"), False),  # one engine is restarted
        (("unloaded", "loading"), False),
        (("unloaded", "loading", "ready"), False),
        (("loading", "unloaded"), True),
    ],
)
def test_the_last_state_shows_whether_all_engines_have_exited(
    states: tuple[LoadState, ...], have_exited: bool
) -> None:
    bench = on_demand(*states[:-1])
    before = bench.loads.num_exits(NAME)
    bench.set(states[-1])
    assert (bench.loads.num_exits(NAME) != before) == have_exited
    before = bench.loads.num_exits(NAME)
    bench.set(states[-1])  # another model has changed
    assert bench.loads.num_exits(NAME) == before


def test_an_exit_is_counted_though_more_states_have_arrived() -> None:
    bench = on_demand("ready", "stopping")
    before = bench.loads.num_exits(NAME)
    bench.set("unloaded")
    bench.set("loading")
    bench.set("ready")
    assert bench.loads.num_exits(NAME) != before


def test_a_load_is_requested_again_after_all_kept_requests_have_left() -> None:
    bench = on_demand("unloaded")
    bench.loads.keep(NAME)
    bench.loads.start(NAME)
    bench.loads.release(NAME)
    assert bench.loads.start(NAME) is not None


def test_a_refused_load_refuses_the_kept_requests_and_may_be_requested_again() -> None:
    bench = on_demand("unloaded")
    bench.loads.start(NAME)
    before = bench.loads.num_refusals(NAME)
    bench.loads.on_message(ControlError(model=NAME, message="needs 9 GiB of 4 GiB"))
    assert bench.loads.num_refusals(NAME) != before
    assert "needs 9 GiB of 4 GiB" in bench.loads.refusal(NAME).message
    assert bench.loads.start(NAME) is not None


def test_an_error_about_no_model_refuses_nothing() -> None:
    bench = on_demand("unloaded")
    bench.loads.on_message(ControlError(message="malformed"))
    bench.loads.on_message(ControlError(message="unknown", model="other"))
    assert bench.loads.num_refusals(NAME) == 0


def test_kept_requests_are_refused_only_when_the_model_becomes_failed() -> None:
    bench = on_demand("failed")
    before = bench.loads.num_refusals(NAME)
    bench.set("failed")
    assert bench.loads.num_refusals(NAME) == before
    bench.set("loading")
    bench.set("failed", "out of memory")
    assert bench.loads.num_refusals(NAME) == before + 1
    assert "out of memory" in bench.loads.refusal(NAME).message


def test_reports_count_open_and_kept_requests_apart() -> None:
    bench = on_demand("unloaded")
    bench.loads.keep(NAME)
    assert bench.loads.report() == ReportUse(open={}, kept={NAME: 1}, version=1)
    bench.loads.release(NAME)
    bench.loads.open(NAME)
    assert bench.loads.report() == ReportUse(open={NAME: 1}, version=1)
    bench.loads.close(NAME)
    assert bench.loads.report() == ReportUse(open={}, version=1)


def test_a_request_between_two_reports_is_reported_as_a_use() -> None:
    bench = on_demand("ready")
    bench.loads.open(NAME)
    bench.loads.close(NAME)
    assert bench.loads.report() == ReportUse(open={NAME: 0}, version=1)
    assert bench.loads.report() == ReportUse(open={}, version=1)


def test_a_report_is_due_after_each_new_version() -> None:
    bench = on_demand()
    assert not bench.loads.must_report
    bench.set("ready")
    assert bench.loads.must_report
    bench.loads.report()
    assert not bench.loads.must_report


def test_a_new_connection_starts_with_version_0_and_requests_loads_again() -> None:
    bench = on_demand("unloaded")
    bench.loads.start(NAME)
    bench.loads.open(NAME)
    bench.loads.on_disconnected()
    assert bench.loads.report() == ReportUse(open={NAME: 1}, version=0)
    assert bench.loads.start(NAME) is not None
