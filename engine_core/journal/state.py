"""An engine's whole state as plain data, and the way back.

`freeze` walks over all objects that the engine consists of. Each object becomes one node, which is
referred to by number wherever it is held, so shared objects stay shared. Objects from outside
(`External`: the configuration, functions, compiled grammars) are stored by name only, and supplied
again by the caller of `thaw`. A matcher is restored by consuming its answer's tokens again.

Data only: a class must belong to a loaded module of ours, and no code of it is called except the
decoder of its messages.
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

External = Mapping[int, str]
"""id of an object that is not stored -> its name"""
Node = list[Any]
"""Its kind and content: plain values, or [number of a node]."""

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
MAPS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
ROWS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozen": frozenset}
KIND_OF = {kind: name for name, kind in (MAPS | ROWS).items()}
_GRAMMAR = "grammar "
ROOMS = ("engine_core.", "protocol.")


class StateError(Exception):
    """An object cannot be stored or restored. The message names it."""


class FrozenObject(msgspec.Struct, frozen=True):
    """The nodes of an object graph."""

    #: The first is the root.
    nodes: list[Node]

    def shapes(self) -> dict[str, set[str]]:
        """Return class -> names of the attributes of its objects."""
        return {node[1]: set(node[2]) for node in self.nodes if node[0] == "object"}


def freeze(root: object, external: External) -> FrozenObject:
    """Return the object graph of `root` as data. O(number of objects). Raises StateError."""
    values: list[object] = [root]
    numbers = {id(root): 0}

    def encode(values: Iterable[Any]) -> list[Any]:
        held = list(values)
        if ATOMS.issuperset(map(type, held)):  # the common case, ten times faster
            return held
        return [value if type(value) in ATOMS else numbered(value) for value in held]

    def numbered(value: object) -> list[int]:
        number = numbers.setdefault(id(value), len(values))
        if number == len(values):
            values.append(value)
        return [number]

    # `values` grows during the loop. It keeps every object alive, so no id is reused.
    return FrozenObject([_node(value, external, encode) for value in values])


def grammar_name(digest: bytes) -> str:
    """Return the name under which a compiled grammar is supplied."""
    return _GRAMMAR + digest.hex()


def grammar_digest_from_name(name: str) -> bytes:
    """Return the digest in a grammar's name. Raises StateError for any other name."""
    try:
        return bytes.fromhex(name.removeprefix(_GRAMMAR))
    except ValueError:
        raise StateError(f"there is no object {name!r}") from None


def _node(value: Any, external: External, encode: Callable[[Iterable[Any]], list[Any]]) -> Node:
    kind = type(value)
    if (name := external.get(id(value))) is not None:
        return ["external", name]
    if (row := KIND_OF.get(kind)) is not None:
        return [row, encode(_flat(value) if row in MAPS else value)]
    if kind is deque:
        return ["deque", value.maxlen, encode(value)]
    if kind is array:
        return ["array", value.typecode, value.tobytes()]
    if isinstance(value, Enum):
        return ["enum", _name_of(kind), value.name]
    if isinstance(value, msgspec.Struct):
        return ["struct", _name_of(kind), [bytes(frame) for frame in wire.encode(value)]]
    if kind is MethodType:
        return ["method", *encode([value.__self__]), value.__name__]
    if kind is FunctionType:
        return ["function", _name_of(value)]
    if kind is Matcher:
        return ["matcher"]
    held = dict(_attributes(value))
    attributes = dict(zip(held, encode(held.values()), strict=True))
    pairs = encode(_flat(value)) if isinstance(value, dict) else []
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
    """Return the name with which `_find` finds it. Raises StateError if it is not ours."""
    name = f"{thing.__module__}:{thing.__qualname__}"
    try:
        found = _find(name)
    except StateError:
        found = None
    if found is not thing:
        raise StateError(f"{name} cannot be stored")
    return name


def _find(name: str) -> Any:
    """Return a top-level class or function of a loaded module of ours. Raises StateError."""
    module, _, word = name.partition(":")
    found = vars(sys.modules[module]).get(word) if _is_ours(module) else None
    if not isinstance(found, type | FunctionType) or found.__module__ != module:
        raise StateError(f"there is no {name}")
    return found


def _is_ours(module: str) -> bool:
    return module.startswith(ROOMS) and module in sys.modules


def thaw(
    frozen: FrozenObject, externals: Callable[[str], object], start: Callable[[bytes], Matcher]
) -> Any:
    """Return the object graph. Raises StateError, and whatever malformed nodes may cause.

    - externals: returns an external object by its name
    - start: returns a grammar's matcher before the first token, by the grammar's digest
    """
    return _Thawing(frozen.nodes, externals, start).all()


class _Thawing:
    """Restores an object graph in three passes.

    First it creates empty shells of all mutable objects. Then it fills them. Dicts and sets come
    last, because their keys must be complete before they are hashed. Immutable objects are created
    when first needed.
    """

    def __init__(
        self,
        nodes: list[Node],
        externals: Callable[[str], object],
        start: Callable[[bytes], Matcher],
    ) -> None:
        self._nodes = nodes
        self._externals = externals
        self._start = start
        self._restored: dict[int, Any] = {}

    def all(self) -> Any:
        for number, node in enumerate(self._nodes):
            if (shell := _shell(node)) is not None:
                self._restored[number] = shell
        shells = [(self._restored[number], self._nodes[number]) for number in list(self._restored)]
        for shell, node in shells:
            self._fill(shell, node)
        for shell, node in shells:
            self._fill_by_value(shell, node)
        for shell, _ in shells:
            if isinstance(shell, Request) and shell.matcher is not None:
                shell.matcher = self._matcher(shell)
        return self._get([0])

    def _get(self, refs: Any) -> Any:
        if not isinstance(refs, list):
            return refs
        (number,) = refs
        if number not in self._restored:
            self._restored[number] = self._restore_value(self._nodes[number])
        return self._restored[number]

    def _values(self, refs: Iterable[Any]) -> Iterator[Any]:
        return map(self._get, refs)

    def _restore_value(self, node: Node) -> Any:
        """Return an object that is immutable, or that needs no shell."""
        match node:
            case ["external", name]:
                return self._externals(name)
            case ["tuple" | "frozen" as row, refs]:
                return ROWS[row](self._values(refs))
            case ["array", typecode, data]:
                return array(typecode, data)
            case ["enum", name, member]:
                return _find(name)[member]
            case ["struct", name, frames]:
                return wire.Decoder(_find(name)).decode(frames)
            case ["method", refs, name]:
                return getattr(self._get(refs), name)
            case ["function", name]:
                return _find(name)
            case ["matcher"]:
                return Matcher(None)  # `all` replaces it
        raise StateError(f"unknown node kind {node[0]!r}")

    def _fill(self, shell: Any, node: Node) -> None:
        match node:
            case ["list", refs]:
                shell.extend(self._values(refs))
            case ["deque", _, refs]:
                shell.extend(self._values(refs))
            case ["object", _, attributes, _]:
                for name, refs in attributes.items():
                    object.__setattr__(shell, name, self._get(refs))

    def _fill_by_value(self, shell: Any, node: Node) -> None:
        kind, refs = node[0], node[-1]
        if kind == "set":
            shell.update(self._values(refs))
        elif kind in MAPS or kind == "object":
            values = list(self._values(refs))
            for key, value in zip(values[::2], values[1::2], strict=True):
                shell[key] = value

    def _matcher(self, request: Request) -> Matcher:
        """Return the request's matcher, after all tokens of its answer."""
        assert request.grammar is not None
        matcher = self._start(request.grammar)
        for token in request.tokens[request.prompt_tokens :]:
            matcher.consume(token)
        return matcher


def _shell(node: Node) -> Any:
    """Return an empty object if the node's kind is mutable, else None."""
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
