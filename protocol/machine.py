"""The class of all state tables: which events change the state of an object, and to which state.

An object that passes through states (a request, a lease, a child process) keeps its state in a
field. The table of its states is a `Machine`, a constant beside the states. Each pair of a state
and an event either has a row, or is ignored on purpose, or is illegal. An illegal event is a fault
of the program: it raises IllegalMove, and the state stays as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
A = TypeVar("A")


class IllegalMove(RuntimeError):
    """An event occurred in a state that neither has a row for the event nor ignores it.

    subject   the kind of object, and which one it is
    """

    def __init__(self, subject: str, state: Enum, event: Enum) -> None:
        super().__init__(f"{subject}: {event.name} is illegal in {state.name}")


class Machine(Generic[S, E]):
    """The table of the states of one kind of object. It never changes.

    name      the kind of object, for errors
    starts    states in which an object begins
    rows      (state, event) -> next state
    ignores   state -> events that change nothing in it. An event with a row is not ignored, so a
              whole Enum may be given

    Raises ValueError if a state cannot be reached from the starts, or if an event has no row.
    """

    def __init__(
        self,
        name: str,
        *,
        starts: Collection[S],
        rows: Mapping[tuple[S, E], S],
        ignores: Mapping[S, Iterable[E]] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.starts = frozenset(starts)
        self.rows = MappingProxyType(dict(rows))
        pairs = ((state, event) for state, events in ignores.items() for event in events)
        self.ignored = frozenset(pair for pair in pairs if pair not in rows)
        self._next = {**rows, **{pair: pair[0] for pair in self.ignored}}
        self.states = frozenset(state for start in self.starts for state in type(start))
        self.events = frozenset(event for _, named in rows for event in type(named))
        #: The states without a row. An object that has reached one stays there.
        self.final = self.states - {state for state, _ in rows}
        self._check()

    def move(self, state: S, event: E, *, subject: object = None) -> S:
        """Return the state after `event`. It is `state` itself if that state ignores the event.
        Raises IllegalMove.

        subject   identifies the object in the error; None: the name of the machine is enough
        """
        try:
            return self._next[state, event]
        except KeyError:
            raise self._illegal(state, event, subject) from None

    def ignores(self, state: S, event: E) -> bool:
        """Return whether `event` changes nothing in `state`. A row that leads back to `state` is a
        move."""
        return (state, event) in self.ignored

    def admits(self, state: S, event: E) -> bool:
        """Return whether `event` is legal in `state`: whether `move` returns."""
        return (state, event) in self._next

    def _illegal(self, state: S, event: E, subject: object) -> IllegalMove:
        return IllegalMove(self.name if subject is None else f"{self.name} {subject}", state, event)

    def _check(self) -> None:
        """Raise ValueError if a state is unreachable from the starts, or an event has no row."""
        found: set[S] = set()
        reached = set(self.starts)
        while reached != found:
            found = set(reached)
            reached |= {after for (state, _), after in self.rows.items() if state in found}
        if lost := self.states - reached:
            raise ValueError(f"{self.name}: no events lead to {_names(lost)}")
        if unused := self.events - {event for _, event in self.rows}:
            raise ValueError(f"{self.name}: no state has a row for {_names(unused)}")


class ActingMachine(Machine[S, E], Generic[S, E, A]):
    """A table of states whose rows also name the action that follows.

    rows   (state, event) -> (next state, action)
    idle   the action that follows an ignored event
    """

    def __init__(
        self,
        name: str,
        *,
        starts: Collection[S],
        rows: Mapping[tuple[S, E], tuple[S, A]],
        idle: A,
        ignores: Mapping[S, Iterable[E]] = MappingProxyType({}),
    ) -> None:
        moves = {pair: after for pair, (after, _) in rows.items()}
        super().__init__(name, starts=starts, rows=moves, ignores=ignores)
        self.actions = MappingProxyType({pair: action for pair, (_, action) in rows.items()})
        self._acts = {**rows, **{pair: (pair[0], idle) for pair in self.ignored}}

    def act(self, state: S, event: E) -> tuple[S, A]:
        """Return the state after `event`, as `move` does, and the action. Raises IllegalMove."""
        try:
            return self._acts[state, event]
        except KeyError:
            raise self._illegal(state, event, None) from None


def _names(members: Iterable[Enum]) -> str:
    return ", ".join(sorted(each.name for each in members))
