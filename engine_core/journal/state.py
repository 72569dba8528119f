"""All that an engine is at a moment, as plain data, and an engine made of it again.

A walk over what it consists of: one node for each object, which is named by its number wherever it
is held, so what was shared is shared again. What comes from outside (`Given`: its configuration,
the functions it was handed, compiled grammars) is named and not written; whoever makes the engine
again brings it. A constrained answer's place in its grammar is found again by its tokens.

Data only: a class is one of our own rooms that is loaded already, and nothing of it is called but
the decoder of its messages.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import msgspec

from engine_core.grammar.matcher import Matcher
from engine_core.request import Request
from protocol import wire

Given = Mapping[int, str]
"""id of an object that is not written -> its name"""
Node = list[Any]
"""Its kind, and what it consists of: plain values, or [number of a node]."""

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
MAPS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
ROWS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozen": frozenset}
KIND_OF = {kind: name for name, kind in (MAPS | ROWS).items()}
_GRAMMAR = "grammar "
ROOMS = ("engine_core.", "protocol.")


class Unknown(Exception):
    """Something that this file cannot write down, or make again. The message names it."""


class FrozenObject(msgspec.Struct, frozen=True):
    """nodes  the first is what was asked for"""

    nodes: list[Node]

    def shapes(self) -> dict[str, set[str]]:
        """class -> names of the attributes that its objects have"""
        return {node[1]: set(node[2]) for node in self.nodes if node[0] == "object"}


def freeze(root: object, given: Given) -> FrozenObject:
    """O(all that it consists of). Raises Unknown."""
    values: list[object] = [root]
    numbers = {id(root): 0}

    def told(pieces: Iterable[Any]) -> list[Any]:
        held = list(pieces)
        if ATOMS.issuperset(map(type, held)):  # most of what there is, in a tenth of the time
            return held
        return [piece if type(piece) in ATOMS else numbered(piece) for piece in held]

    def numbered(value: object) -> list[int]:
        number = numbers.setdefault(id(value), len(values))
        if number == len(values):
            values.append(value)
        return [number]

    # `values` grows while we go through it, and keeps all of them, so that no id is used twice
    return FrozenObject([_node(value, given, told) for value in values])


def named(digest: bytes) -> str:
    """A compiled grammar, as it is given."""
    return _GRAMMAR + digest.hex()


def grammar_of(name: str) -> bytes:
    """Its digest. Raises Unknown for the name of something else."""
    try:
        return bytes.fromhex(name.removeprefix(_GRAMMAR))
    except ValueError:
        raise Unknown(f"nobody gives {name!r}") from None


def _node(value: Any, given: Given, told: Callable[[Iterable[Any]], list[Any]]) -> Node:
    kind = type(value)
    if (name := given.get(id(value))) is not None:
        return ["given", name]
    if (row := KIND_OF.get(kind)) is not None:
        return [row, told(_flat(value) if row in MAPS else value)]
    if kind is deque:
        return ["deque", value.maxlen, told(value)]
    if kind is array:
        return ["array", value.typecode, value.tobytes()]
    if isinstance(value, Enum):
        return ["enum", _name_of(kind), value.name]
    if isinstance(value, msgspec.Struct):
        return ["struct", _name_of(kind), [bytes(frame) for frame in wire.encode(value)]]
    if kind is MethodType:
        return ["method", *told([value.__self__]), value.__name__]
    if kind is FunctionType:
        return ["function", _name_of(value)]
    if kind is Matcher:
        return ["matcher"]
    held = dict(_attributes(value))
    attributes = dict(zip(held, told(held.values()), strict=True))
    pairs = told(_flat(value)) if isinstance(value, dict) else []
    return ["object", _name_of(kind), attributes, pairs]


def _flat(pairs: dict[Any, Any]) -> Iterator[Any]:
    return chain.from_iterable(pairs.items())


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


def _name_of(thing: type[Any] | FunctionType) -> str:
    """By which `_find` finds it. Raises Unknown for what is none of ours."""
    name = f"{thing.__module__}:{thing.__qualname__}"
    try:
        found = _find(name)
    except Unknown:
        found = None
    if found is not thing:
        raise Unknown(f"{name} cannot be written down")
    return name


def _find(name: str) -> Any:
    """A class or a function at the top of a module of ours that is loaded. Raises Unknown."""
    module, _, word = name.partition(":")
    found = vars(sys.modules[module]).get(word) if _is_ours(module) else None
    if not isinstance(found, type | FunctionType) or found.__module__ != module:
        raise Unknown(f"there is no {name}")
    return found


def _is_ours(module: str) -> bool:
    return module.startswith(ROOMS) and module in sys.modules


def thaw(
    frozen: FrozenObject, given: Callable[[str], object], start: Callable[[bytes], Matcher]
) -> Any:
    """What was frozen. Raises Unknown, and whatever nodes of no meaning may cause.

    given   what was given to `freeze`, by its name
    start   a grammar's matcher before the first token, by the grammar's digest
    """
    return _Thawing(frozen.nodes, given, start).all()


class _Thawing:
    """First empty shells of all that can be changed; then what they hold, and last what is found by
    its value: maps and sets, whose keys must be whole. What cannot be changed is made when it is
    first asked for."""

    def __init__(
        self,
        nodes: list[Node],
        given: Callable[[str], object],
        start: Callable[[bytes], Matcher],
    ) -> None:
        self._nodes = nodes
        self._given = given
        self._start = start
        self._made: dict[int, Any] = {}

    def all(self) -> Any:
        for number, node in enumerate(self._nodes):
            if (shell := _shell(node)) is not None:
                self._made[number] = shell
        shells = [(self._made[number], self._nodes[number]) for number in list(self._made)]
        for shell, node in shells:
            self._fill(shell, node)
        for shell, node in shells:
            self._fill_by_value(shell, node)
        for shell, _ in shells:
            if isinstance(shell, Request) and shell.matcher is not None:
                shell.matcher = self._matcher(shell)
        return self._get([0])

    def _get(self, told: Any) -> Any:
        if not isinstance(told, list):
            return told
        (number,) = told
        if number not in self._made:
            self._made[number] = self._whole(self._nodes[number])
        return self._made[number]

    def _pieces(self, told: Iterable[Any]) -> Iterator[Any]:
        return map(self._get, told)

    def _whole(self, node: Node) -> Any:
        """What cannot be changed, or need not be."""
        match node:
            case ["given", name]:
                return self._given(name)
            case ["tuple" | "frozen" as row, told]:
                return ROWS[row](self._pieces(told))
            case ["array", typecode, data]:
                return array(typecode, data)
            case ["enum", name, member]:
                return _find(name)[member]
            case ["struct", name, frames]:
                return wire.Decoder(_find(name)).decode(frames)
            case ["method", told, name]:
                return getattr(self._get(told), name)
            case ["function", name]:
                return _find(name)
            case ["matcher"]:
                return Matcher(None)  # `all` puts the right one in its place
        raise Unknown(f"a node of kind {node[0]!r}")

    def _fill(self, shell: Any, node: Node) -> None:
        match node:
            case ["list", told]:
                shell.extend(self._pieces(told))
            case ["deque", _, told]:
                shell.extend(self._pieces(told))
            case ["object", _, attributes, _]:
                for name, told in attributes.items():
                    object.__setattr__(shell, name, self._get(told))

    def _fill_by_value(self, shell: Any, node: Node) -> None:
        kind, told = node[0], node[-1]
        if kind == "set":
            shell.update(self._pieces(told))
        elif kind in MAPS or kind == "object":
            pieces = list(self._pieces(told))
            for key, value in zip(pieces[::2], pieces[1::2], strict=True):
                shell[key] = value

    def _matcher(self, request: Request) -> Matcher:
        """Where its answer is by now."""
        assert request.grammar is not None
        matcher = self._start(request.grammar)
        for token in request.tokens[request.prompt_tokens :]:
            matcher.consume(token)
        return matcher


def _shell(node: Node) -> Any:
    """Empty, of what can be changed; None of what cannot."""
    kind = node[0]
    if kind in MAPS:
        return MAPS[kind]()
    if kind in ("list", "set"):
        return ROWS[kind]()
    if kind == "deque":
        return deque(maxlen=node[1])
    if kind == "object":
        found = _find(node[1])
        return (dict if issubclass(found, dict) else object).__new__(found)
    return None
