"""What an answer must look like: written by a client, enforced by the engine token by token.

A `Grammar` describes the whole answer: an optional stretch of thinking, then a body. The body
begins exactly where the thinking ends, so there is no gate beside the grammar to disagree with it.
A `ThinkingBudget` may stand beside the body, or alone, and then the answer is free text.

A marker (`Thinking.opens`, `Tag.begin`, `LiteralForm`, ...) is written as text. Where a part of it
is a token that the vocabulary has for itself ("</think>", "<|channel|>"), that token alone counts,
never the same letters spelt by other tokens; the engine looks that up. Conversely such a token is
never text: no string of a constrained answer can hold one.

Bounds are checked by grammar_check.py, not while decoding: one request's fault is its own refusal.
"""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What may precede the body: free text in blocks between two markers, blanks after each.

    opens      begins a block; "" where only the template writes it: no second block can come
    closes     ends a block
    inside     the prompt ends inside a block: the answer begins with the rest of it
    optional   if not `inside`: the answer may begin with the body at once
    """

    closes: str
    opens: str = ""
    inside: bool = False
    optional: bool = False


class ThinkingBudget(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """At most so many tokens between the markers, in all blocks of an answer together; then the
    marker that closes the block is written, token by token, and the model goes on behind it.

    most     0: a block is closed as soon as it is opened
    opens    what begins a block; one without any token of its own only where nothing but blanks
             precedes it
    closes   what ends one; that of `opens[i]` is `closes[i]` if there is one, else the first
    inside   the prompt ends inside a block, which the first of `closes` ends

    A marker that is spelt out counts as thinking as long as it is not complete.
    """

    most: int
    closes: list[str]
    opens: list[str] = []
    inside: bool = False


class _Body(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True, kw_only=True):
    """Base of the forms a body can have."""


class JsonSchema(_Body, frozen=True, tag="json_schema", kw_only=True):
    """JSON that `text`, a JSON Schema (draft 2020-12) in JSON, admits.

    Keywords that cannot be enforced are refused by name. Properties come in the schema's order.
    """

    text: str


class JsonObject(_Body, frozen=True, tag="json_object", kw_only=True):
    """Any JSON object."""


class Regex(_Body, frozen=True, tag="regex", kw_only=True):
    """Text that `pattern` (the syntax of Rust's regex crate; no look-around) matches as a whole."""

    pattern: str


class ChoiceGrammar(_Body, frozen=True, tag="choice", kw_only=True):
    """One of these texts."""

    choices: list[str]


class Lark(_Body, frozen=True, tag="lark", kw_only=True):
    """A context-free grammar in llguidance's dialect of Lark; the rule `start` is the body.

    `<[151657]>` and `<|python_tag|>` in it are tokens, by id and by name. `@name` refers to one of
    `schemas` (name -> JSON Schema in JSON), which is enforced as in `JsonSchema`.
    """

    text: str
    schemas: dict[str, str] = {}


class Gbnf(_Body, frozen=True, tag="gbnf", kw_only=True):
    """A context-free grammar in the GBNF of llama.cpp; the rule `root` is the body."""

    text: str


class Tag(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`begin`, then JSON that `schema` admits, then `end`."""

    begin: str
    schema: str
    end: str


class Structural(_Body, frozen=True, tag="structural", kw_only=True):
    """Free text in which a trigger must go on as one of the tags that begin with it.

    at_least_one   the answer has a tag
    only_one       the answer ends with its first tag
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    only_one: bool = False


class _Form(msgspec.Struct, frozen=True, tag_field="form", omit_defaults=True):
    """Base of what `Rules` are made of."""


class LiteralForm(_Form, frozen=True, tag="text"):
    """Exactly `text`, which may be empty; its markers are tokens."""

    text: str


class Json(_Form, frozen=True, tag="json"):
    """JSON that `schemas[schema]` of the rules admits."""

    schema: str


class Pattern(_Form, frozen=True, tag="pattern"):
    """Text without markers that `pattern` (Rust's regex syntax) matches as a whole."""

    pattern: str


class Until(_Form, frozen=True, tag="until"):
    """Text without markers that `pattern` matches, up to the first `end` behind it; `end` itself
    is part of this. `end` is not empty."""

    end: str
    pattern: str = "(?s:.*)"


class GrammarRule(_Form, frozen=True, tag="rule"):
    """What `rules[rule]` says. Rules may refer to themselves."""

    rule: str


class Sequence(_Form, frozen=True, tag="sequence"):
    """One behind the other."""

    items: list[Form]


class Either(_Form, frozen=True, tag="either"):
    """One of these."""

    options: list[Form]


class Repeat(_Form, frozen=True, tag="repeat"):
    """`item`, from `least` to `most` times; None: as often as the model likes."""

    item: Form
    least: int = 0
    most: int | None = None


Form = LiteralForm | Json | Pattern | Until | GrammarRule | Sequence | Either | Repeat


class Rules(_Body, frozen=True, tag="rules", kw_only=True):
    """A context-free grammar, in no engine's dialect; `start` is the body.

    rules    name -> form, for what `GrammarRule` refers to
    schemas  name -> JSON Schema in JSON, enforced as in `JsonSchema`
    """

    start: Form
    rules: dict[str, Form] = {}
    schemas: dict[str, str] = {}


Body = JsonSchema | JsonObject | Regex | ChoiceGrammar | Lark | Gbnf | Structural | Rules


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """
    body           None: free text, with a budget
    before, after  fixed text around the body, behind the thinking: markup that the answers of
                   some models need around all they say
    calls          what the answer may be instead of `before`, the body and `after`: tool calls, in
                   the model's own format
    """

    body: Body | None = None
    thinking: Thinking | None = None
    budget: ThinkingBudget | None = None
    before: str = ""
    after: str = ""
    calls: Rules | None = None
