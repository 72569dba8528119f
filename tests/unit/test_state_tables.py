"""The class of the state tables, and what holds for each table and for the objects that use it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_core.admission.check_generate import new_request
from engine_core.kv.fetches import Fetch
from engine_core.kv.leases import KVLease
from engine_core.requests.adapter import EngineAdapter
from engine_core.requests.stage_timer import EngineClock
from gateway.fleet.failover import Failover
from gateway.fleet.handoff import Handoff, HandoffState
from protocol.engine.messages import Generate
from protocol.machine import ActingMachine, IllegalMove, Machine
from protocol.wire.arrays import Int32
from tests.support.engines import CLIENT, Bench, a_card
from tools.cluster.placement_states import PlacedEngine
from tools.processes.child_states import ChildRecord
from tools.processes.restart_policy import RestartPolicy

ROOT = Path(__file__).parents[2]
ROOMS = ("gateway", "engine_core", "worker", "tools", "simulator")


class DoorState(Enum):
    SHUT = auto()
    OPEN = auto()
    GONE = auto()


class DoorEvent(Enum):
    PUSH = auto()
    PULL = auto()
    BURN = auto()


SHUT, OPEN, GONE = DoorState
PUSH, PULL, BURN = DoorEvent
DOOR = Machine(
    "door",
    starts=(SHUT,),
    rows={(SHUT, PUSH): OPEN, (OPEN, PUSH): OPEN, (OPEN, PULL): SHUT, (OPEN, BURN): GONE},
    ignores={SHUT: {PULL}, GONE: DoorEvent},
)


# ---- the class


def test_a_row_moves_and_an_ignored_event_changes_nothing() -> None:
    assert DOOR.move(SHUT, PUSH) is OPEN
    assert DOOR.move(SHUT, PULL) is SHUT
    assert (DOOR.ignores(SHUT, PULL), DOOR.ignores(OPEN, PUSH)) == (True, False)
    assert DOOR.final == {GONE}


def test_an_event_with_a_row_is_not_ignored() -> None:
    door = Machine(
        "door",
        starts=(SHUT, GONE),
        rows={(SHUT, PUSH): OPEN, (SHUT, PULL): SHUT, (OPEN, BURN): SHUT},
        ignores={SHUT: DoorEvent},
    )
    assert door.ignored == {(SHUT, BURN)}
    assert door.move(SHUT, PUSH) is OPEN


def test_an_illegal_event_raises_the_machine_the_state_and_the_event() -> None:
    with pytest.raises(IllegalMove, match=r"^door: BURN is illegal in SHUT$"):
        DOOR.move(SHUT, BURN)
    with pytest.raises(IllegalMove, match=r"^door 0: BURN is illegal in SHUT$"):
        DOOR.move(SHUT, BURN, subject=0)
    assert not DOOR.admits(SHUT, BURN)


def test_a_state_that_no_events_lead_to_is_refused() -> None:
    rows = {(SHUT, PUSH): OPEN, (OPEN, PULL): SHUT, (GONE, BURN): GONE}
    with pytest.raises(ValueError, match=r"^door: no events lead to GONE$"):
        Machine("door", starts=(SHUT,), rows=rows)


def test_an_event_without_a_row_is_refused() -> None:
    rows = {(SHUT, PUSH): OPEN, (OPEN, PUSH): GONE}
    with pytest.raises(ValueError, match=r"^door: no state has a row for BURN, PULL$"):
        Machine("door", starts=(SHUT,), rows=rows, ignores={OPEN: {PULL}})


def test_an_acting_machine_returns_the_action_of_the_row_or_the_idle_one() -> None:
    door = ActingMachine(
        "door",
        starts=(SHUT,),
        rows={
            (SHUT, PUSH): (OPEN, "creak"),
            (OPEN, PULL): (SHUT, "bang"),
            (OPEN, BURN): (GONE, ""),
        },
        ignores={GONE: DoorEvent},
        idle="silence",
    )
    assert door.act(SHUT, PUSH) == (OPEN, "creak")
    assert door.act(GONE, PUSH) == (GONE, "silence")
    with pytest.raises(IllegalMove, match=r"^door: PULL is illegal in SHUT$"):
        door.act(SHUT, PULL)


# ---- all tables

AnyMachine = Machine[Any, Any]


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def machines() -> dict[str, AnyMachine]:
    """Return the state tables of all rooms by name."""
    found: dict[str, AnyMachine] = {}
    for path in sources():
        names = re.findall(r"^(\w+) = (?:Acting)?Machine\($", path.read_text(), re.MULTILINE)
        if names:
            module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found |= {getattr(module, name).name: getattr(module, name) for name in names}
    return found


def by_name(members: Iterable[Enum]) -> list[Enum]:
    return sorted(members, key=lambda member: member.name)


MACHINES = machines()
PAIRS = [
    (name, state, event)
    for name, machine in MACHINES.items()
    for state, event in product(by_name(machine.states), by_name(machine.events))
]


@pytest.mark.parametrize(("name", "state", "event"), PAIRS)
def test_each_pair_moves_or_is_ignored_or_raises(name: str, state: Enum, event: Enum) -> None:
    machine = MACHINES[name]
    if (state, event) in machine.rows:
        assert machine.move(state, event) is machine.rows[state, event]
        assert not machine.ignores(state, event)
    elif (state, event) in machine.ignored:
        assert machine.move(state, event) is state
    else:
        with pytest.raises(IllegalMove, match=f"^{name}: {event.name} is illegal in {state.name}$"):
            machine.move(state, event)


def test_each_table_of_states_is_a_machine() -> None:
    """A dict from pairs of Enum members is one argument of a Machine, and nothing else."""
    for path in sources():
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        rows = {id(each.value) for call in calls if is_machine(call) for each in call.keywords}
        dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
        tables = [node for node in dicts if is_table(node) and id(node) not in rows]
        where = [f"{path.relative_to(ROOT)}:{node.lineno}" for node in tables]
        assert not where, f"a table of states is a Machine of protocol/machine.py: {where}"
    assert len(MACHINES) > 12, sorted(MACHINES)


def is_machine(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in ("Machine", "ActingMachine")


def is_table(node: ast.Dict) -> bool:
    return any(
        isinstance(key, ast.Tuple) and all(isinstance(part, ast.Attribute) for part in key.elts)
        for key in node.keys
    )


# ---- the objects that have a state


def a_request() -> Any:
    message = Generate(request=1, prompt=Int32.of([1]))
    return new_request(CLIENT, message, [1], 1, lambda: 0, a_card(), Bench().limits, EngineClock())


#: Name of the machine -> a new object, its field, and the method that handles an event.
OBJECTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "request": (a_request, "phase", "move"),
    "lease": (lambda: KVLease(b"l", [1], checkpoint=1, term=1, until=1), "state", "move"),
    "fetch": (lambda: Fetch(1, SimpleNamespace(), SimpleNamespace(), 0.0), "state", "move"),  # type: ignore[arg-type]
    "adapter": (lambda: EngineAdapter("fr", "fr", 0, 1), "state", "move"),
    "child": (lambda: ChildRecord("a", "a", RestartPolicy(1), deadline=7.0), "state", "change"),
    "placement": (
        lambda: PlacedEngine("a", RestartPolicy(1), since=0.0, node="n", address="x", deadline=7.0),
        *("state", "change"),
    ),
    "handoff": (lambda: Handoff(HandoffState.COMPUTING), "state", "on"),
    "failover": (Failover, "state", "on"),
}


@pytest.mark.parametrize(("name", "state", "event"), [each for each in PAIRS if each[0] in OBJECTS])
def test_an_object_follows_its_table_and_an_illegal_event_changes_nothing(
    name: str, state: Enum, event: Enum
) -> None:
    create, field, method = OBJECTS[name]
    machine, changed = MACHINES[name], create()
    setattr(changed, field, state)
    before = fields_of(changed)
    if machine.admits(state, event):
        getattr(changed, method)(event)
        assert getattr(changed, field) is machine.move(state, event)
    else:
        with pytest.raises(IllegalMove, match=f"{event.name} is illegal in {state.name}"):
            getattr(changed, method)(event)
        assert fields_of(changed) == before


def fields_of(changed: object) -> dict[str, Any]:
    return {name: getattr(changed, name) for name in type(changed).__slots__}  # type: ignore[attr-defined]
