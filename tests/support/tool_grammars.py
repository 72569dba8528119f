"""Test kit for grammars of tool calls: models of bytes and markers, random walks through a grammar,
and the calls that are read back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

import msgspec
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers

from engine_core.grammar.compiler import Compiler
from engine_core.grammar.masks import compute_masks
from engine_core.grammar.matcher import Matcher, MatcherTemplate
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import Event, Finished, ToolArguments, ToolCall, ToolCallEnd, merged
from gateway.formats.lexicon import MarkerToken
from gateway.formats.registry import BoundFormat, Format, bind
from gateway.text.tokenizer import Tokenizer
from protocol.engine.grammar import Body, Grammar, LiteralForm, Rules, Until, forms_of
from protocol.engine.messages import Output
from protocol.engine.model_card import ModelCard
from tests.support.formats import units
from tests.support.grammars import possible
from tests.support.tokenizers import card_of

EOS = "<eos>"
CLOSERS = ('"', "'", "</a>", ">", "}", "]", '"}', '"]', "</", ")", ",", "0", "true")
"""Texts that end values of most kinds."""
EXPONENT = re.compile(r"[0-9][eE][+-]?[0-9][0-9]\Z")
PATIENCE, LIMIT = 60, 4000
"""Steps after which a walk prefers to end, and after which it fails."""

PLACE = {
    "type": "object",
    "properties": {"語": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "where": PLACE,
        "kind": {"enum": ["é", "b c", "<d>", 3]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
        "note": {"type": "string"},
    },
    "required": ["where", "kind"],
    "additionalProperties": False,
}
PLAIN = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
    },
    "required": ["s", "x", "b"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (
    DeclaredTool("now_utc", NOTHING),
    DeclaredTool("find_place", NESTED),
    DeclaredTool("set_values", PLAIN),
)


def byte_tokenizer(markers: Iterable[str]) -> bytes:
    """Return a tokenizer.json whose tokens are the 256 bytes, the end token and `markers`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = hf.Tokenizer(models.BPE(vocab={sign: n for n, sign in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([EOS, *markers])
    return inner.to_str().encode()


@cache
def _byte_card(markers: tuple[str, ...]) -> ModelCard:
    size = 257 + len(set(markers))
    return card_of(byte_tokenizer(markers), vocab_size=size, eos_token_ids=[256])


_TOKENIZERS: dict[tuple[bytes, int, tuple[int, ...]], Tokenizer] = {}
_COMPILERS: dict[tuple[bytes, int, tuple[int, ...]], Compiler] = {}
"""Tokenizers and compilers by vocabulary. Most models of a test have the vocabulary of another, and
neither keeps anything of a text or of a grammar."""
_Made = TypeVar("_Made")


def _shared(
    made: dict[tuple[bytes, int, tuple[int, ...]], _Made],
    card: ModelCard,
    make: Callable[[ModelCard], _Made],
) -> _Made:
    """Return what `make` returns for a card with this vocabulary."""
    key = card.tokenizer, card.vocab_size, tuple(card.eos_token_ids)
    if key not in made:
        made[key] = make(card)
    return made[key]


@dataclass
class Model:
    """A model that writes in `format`. Its vocabulary has `markers`, or is that of `card`.

    Each grammar is compiled once, since most tests start several answers of one grammar.
    """

    format: Format
    markers: Sequence[str] = ()
    card: ModelCard | None = None
    _templates: dict[bytes, MatcherTemplate] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _card(self) -> ModelCard:
        return _byte_card(tuple(self.markers)) if self.card is None else self.card

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return _shared(_TOKENIZERS, self._card, Tokenizer)

    @cached_property
    def compiler(self) -> Compiler:
        return _shared(_COMPILERS, self._card, Compiler)

    @cached_property
    def bound(self) -> BoundFormat:
        return bind(self.format, self.tokenizer)

    def ids(self, text: str) -> list[int]:
        """Return the tokens with which this model writes `text`. A `spelt` marker is not written as
        its token."""
        found: list[int] = []
        for run in units(text, self.bound.lexicon):
            if isinstance(run, MarkerToken):
                found.append(run.token_id)
            else:
                found += self.tokenizer.encode(run if isinstance(run, str) else run.text, False)
        return found

    def start(self, body: Body, **around: Any) -> Matcher:
        grammar = Grammar(body=body, **around)
        key = msgspec.msgpack.encode(grammar)
        if key not in self._templates:
            self._templates[key] = self.compiler.compile(grammar)
        return self._templates[key].start()

    def refused(self, body: Body, text: str, **around: Any) -> str | None:
        """Return the rest of `text` from the first token that the grammar refuses; "(the end)" if
        the grammar refuses only the end; None if the text is a whole answer."""
        matcher, ids = self.start(body, **around), self.ids(text)
        for place, token in enumerate(ids):
            if matcher.is_complete or not self.admits(matcher, token):
                return self.tokenizer.decode(ids[place:], skip_special_tokens=False)
            matcher.consume(token)
            assert matcher.error is None
        if matcher.is_complete or any(self.admits(matcher, end) for end in self.ends):
            return None
        return "(the end)"

    @property
    def ends(self) -> set[int]:
        return set(self._card.eos_token_ids)

    def admits(self, matcher: Matcher, token: int) -> bool:
        """Return whether the grammar admits `token` next. For a large vocabulary, this is much
        faster than `possible`."""
        mask = bytes(compute_masks([matcher], self._card.vocab_size).data)
        return bool(mask[token // 8] >> token % 8 & 1)

    def possible(self, matcher: Matcher) -> set[int]:
        return possible(matcher, self._card.vocab_size)

    def read(
        self,
        ids: Sequence[int],
        tools: Sequence[DeclaredTool],
        *,
        inside: bool = False,
        calls_or_text: bool = False,
    ) -> list[Event]:
        options = AnswerOptions(
            format=self.bound, tools=tools, starts_inside=inside, calls_or_text=calls_or_text
        )
        reader = ParserFactory(self.tokenizer, None, options).new()
        return merged(reader.push(Output(request=1, tokens=list(ids), finish="stop")).events)


class Endless(AssertionError):
    """Raised if a walk has LIMIT tokens and no end. A test decides whether that is a failure."""


@dataclass
class Walk:
    """A random walk through a grammar. A call returns the tokens of an answer.

    The walk prefers markup of the format wherever the grammar admits it, even where markup does not
    belong, such as in strings. After PATIENCE steps, it prefers to end. `closers` are further texts
    that end values.
    """

    model: Model
    rng: random.Random
    closers: Sequence[str] = ()

    def __call__(self, body: Rules, calls: Rules | None = None, **around: Any) -> list[int]:
        matcher = self.model.start(body, calls=calls, **around)
        drawn, plan = list[int](), list[int]()
        parts = [body] if calls is None else [body, calls]
        hints = [hint for part in parts for hint in self._hints(part)]
        ends = [end for part in parts for end in self._ends(part)]
        while not matcher.is_complete:
            if len(drawn) >= LIMIT:
                raise Endless(self.model.tokenizer.decode(drawn, skip_special_tokens=False))
            allowed = self._readable(drawn, self.model.possible(matcher))
            late = len(drawn) > PATIENCE
            if late and self.model.ends & allowed:
                break
            if not plan or plan[0] not in allowed:
                ending = late and self.rng.random() < 0.5
                plan = self._next(allowed, ends if ending else hints, late)
            token = plan.pop(0)
            if token in self.model.ends:
                break
            matcher.consume(token)
            assert matcher.error is None
            drawn.append(token)
        return drawn

    def _readable(self, drawn: Sequence[int], allowed: set[int]) -> set[int]:
        """Return the `allowed` tokens, without another digit if an exponent has two. In JSON of a
        schema, llguidance admits exponents of any length, and there is a warning about arguments
        with a number that JSON readers cannot hold."""
        end = self.model.tokenizer.decode(drawn[-5:], skip_special_tokens=False)
        return allowed - self._digits if EXPONENT.search(end) else allowed

    @cached_property
    def _digits(self) -> set[int]:
        return {token for digit in "0123456789" for token in self.model.ids(digit)}

    def _hints(self, body: Rules) -> list[list[int]]:
        texts = {form.text for form in forms_of(body) if isinstance(form, LiteralForm)}
        texts |= {form.end for form in forms_of(body) if isinstance(form, Until)}
        return [self.model.ids(text) for text in sorted({*texts, *CLOSERS} - {""})]

    def _ends(self, body: Rules) -> list[list[int]]:
        """Return the tokens of each text that ends a free text."""
        ends = {form.end for form in forms_of(body) if isinstance(form, Until)} | {*self.closers}
        return [self.model.ids(end) for end in sorted(ends)]

    def _next(self, allowed: set[int], hints: Sequence[list[int]], late: bool) -> list[int]:
        found = [hint for hint in hints if hint[0] in allowed]
        if found and self.rng.random() < (0.95 if late else 0.4):
            return list(self.rng.choice(found))
        return [self.rng.choice(sorted(allowed))]


# ---- the calls of an answer


@dataclass(frozen=True)
class Called:
    name: str
    arguments: Any


def calls_of(events: Sequence[Event]) -> list[Called]:
    """Return the calls of an answer. Checks that it consists of complete calls and nothing else."""
    found = []
    events, last = events[:-1], events[-1]
    assert isinstance(last, Finished), events
    assert len(events) % 3 == 0, events
    for call, arguments, end in zip(events[::3], events[1::3], events[2::3], strict=True):
        assert isinstance(call, ToolCall), events
        assert isinstance(arguments, ToolArguments), events
        assert isinstance(end, ToolCallEnd), events
        found.append(Called(call.name, json.loads(arguments.fragment)))
    return found


def fault(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return why `schema` does not admit `value`, or None if it does. Only keywords that occur in
    the schemas of this module are checked."""
    if "enum" in schema:
        return None if value in schema["enum"] else f"{value!r} is none of {schema['enum']}"
    if not _KINDS[schema.get("type", "any")](value):
        return f"{value!r} is no {schema['type']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        return f"{value!r} is too long"
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            return f"{value!r} has too many items"
        return next(filter(None, (fault(item, schema.get("items", {})) for item in value)), None)
    return _object_fault(value, schema) if isinstance(value, dict) else None


def _object_fault(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    properties = schema.get("properties", {})
    if missing := set(schema.get("required", ())) - set(value):
        return f"{value!r} lacks {missing}"
    others = set(value) - set(properties)
    if others and schema.get("additionalProperties") is False:
        return f"{value!r} has {others}"
    inner = (fault(item, properties.get(key, {})) for key, item in value.items())
    return next(filter(None, inner), None)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
