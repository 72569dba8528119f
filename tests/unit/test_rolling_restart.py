"""The order of a rolling restart, and when it stops."""

from __future__ import annotations

import pytest

from protocol.tools.control import RollEnded, RollProgress
from tools.processes.child_states import ChildState
from tools.processes.rolling_restart import (
    ROLL_MACHINE,
    RetireEngine,
    RollAction,
    RollingRestart,
    RollRefused,
    RollStage,
    StartEngine,
)

DOWN, STARTING, READY = ChildState.DOWN, ChildState.STARTING, ChildState.READY
WAITING, RETIRING = ChildState.WAITING, ChildState.RETIRING
PAIR = {"engine 1": "engine", "engine 2": "engine"}
TIMEOUT_S = 60.0


class RollBench:
    """A rolling restart, and the states of the engines."""

    def __init__(self, groups: dict[str, str], **states: ChildState) -> None:
        self.states = dict.fromkeys(groups, READY) | {
            name.replace("_", " "): state for name, state in states.items()
        }
        self.failures = dict.fromkeys(groups, "")
        self.roll = RollingRestart(groups, self.states, 0.0, timeout_s=TIMEOUT_S)

    def advance(self, now: float = 1.0, **states: ChildState) -> list[RollAction]:
        self.states |= {name.replace("_", " "): state for name, state in states.items()}
        return self.roll.advance(self.states, self.failures, now)


def test_each_engine_is_drained_and_replaced_before_the_next() -> None:
    bench = RollBench(PAIR)
    first = RollProgress(engine="engine 1", stage="draining", number=1, total=2)
    assert bench.advance() == [first, RetireEngine("engine 1")]
    assert bench.advance(engine_1=RETIRING) == []
    first = RollProgress(engine="engine 1", stage="starting", number=1, total=2)
    assert bench.advance(engine_1=DOWN) == [first, StartEngine("engine 1")]
    assert bench.advance(engine_1=STARTING) == []
    ready, second, retire = bench.advance(engine_1=READY)
    assert ready == RollProgress(engine="engine 1", stage="ready", number=1, total=2)
    assert second == RollProgress(engine="engine 2", stage="draining", number=2, total=2)
    assert retire == RetireEngine("engine 2")
    bench.advance(engine_2=DOWN)
    bench.advance(engine_2=STARTING)
    done = RollProgress(engine="engine 2", stage="ready", number=2, total=2)
    assert bench.advance(engine_2=READY) == [done, RollEnded()]
    assert bench.advance() == []


@pytest.mark.parametrize("state", [DOWN, WAITING, STARTING])
def test_a_successor_that_fails_ends_the_roll_and_the_others_are_left_alone(
    state: ChildState,
) -> None:
    bench = RollBench(PAIR)
    bench.advance()
    bench.advance(engine_1=DOWN)
    bench.failures["engine 1"] = "engine 1 was not ready after 60 s"
    actions = bench.advance(engine_1=state)
    assert actions == [RollEnded(error="engine 1 was not ready after 60 s")]
    assert bench.advance(engine_1=READY) == []


def test_an_engine_is_not_drained_until_another_one_is_ready() -> None:
    bench = RollBench(PAIR, engine_2=STARTING)
    assert bench.advance() == []
    assert RetireEngine("engine 1") in bench.advance(engine_2=READY)


def test_the_roll_ends_if_no_other_engine_gets_ready() -> None:
    bench = RollBench(PAIR, engine_2=WAITING)
    assert bench.advance(TIMEOUT_S - 1) == []
    assert bench.roll.deadline == TIMEOUT_S
    message = "engine 1 was not restarted, because no other replica was ready within 60 s"
    assert bench.advance(TIMEOUT_S) == [RollEnded(error=message)]


def test_an_engine_that_is_down_is_started_and_not_drained() -> None:
    bench = RollBench(PAIR, engine_1=DOWN)
    assert StartEngine("engine 1") in bench.advance()


@pytest.mark.parametrize("down", ["engine 1", "engine 2"])
def test_an_engine_that_is_down_is_started_before_others_drain(down: str) -> None:
    bench = RollBench(PAIR, **{down.replace(" ", "_"): DOWN})
    assert bench.advance()[-1] == StartEngine(down)


def test_models_with_one_engine_or_that_are_not_loaded_are_left_alone() -> None:
    groups = {"a": "a", "b1": "b", "b2": "b", "c1": "c", "c2": "c"}
    bench = RollBench(groups, b1=DOWN, b2=DOWN)
    assert bench.advance()[-1] == RetireEngine("c1")
    with pytest.raises(RollRefused, match="several engines"):
        RollingRestart({"a": "a"}, {"a": READY}, 0.0, timeout_s=TIMEOUT_S)


def test_a_model_that_is_unloaded_meanwhile_is_skipped() -> None:
    groups = {"b1": "b", "b2": "b", "c1": "c", "c2": "c"}
    bench = RollBench(groups, b2=STARTING)
    assert bench.advance() == []
    assert bench.advance(b1=RETIRING, b2=DOWN)[-1] == RetireEngine("c1")


def test_every_stage_except_the_last_can_be_left() -> None:
    assert ROLL_MACHINE.final == {RollStage.ENDED}
