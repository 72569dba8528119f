"""What an answer must match: written by a client, enforced by the engine token by token.

A `Grammar` describes the whole answer: optional thinking, then a body. The body starts exactly
where the thinking ends, so no second check beside the grammar can disagree with it. A
`ThinkingBudget` may be combined with a body. Without a body the answer is free text.

A marker (`Thinking.opens`, `Tag.begin`, `LiteralForm`, ...) is written as text. If part of it is a
special token of the vocabulary ("</think>", "<|channel|>"), only that token matches, never the same
letters spelt with other tokens; the engine does this lookup. Conversely, a special token is never
text: no string in a constrained answer can contain one.

grammar_check.py checks the bounds, not the decoder. So a grammar out of bounds only refuses its own
request.
"""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Thinking before the body: free text in blocks between two markers, with blanks after each
    block.

    opens      starts a block; "" if only the template writes it, so no second block can follow
    closes     ends a block
    inside     the prompt ends inside a block: the answer starts with the rest of it
    optional   if not `inside`: the answer may start with the body at once
    """

    closes: str
    opens: str = ""
    inside: bool = False
    optional: bool = False


class ThinkingBudget(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Limits the tokens between the markers, over all blocks of an answer together. At the limit
    the engine writes the closing marker, token by token, and the model continues after it.

    most     largest number of tokens; 0: a block is closed as soon as it is opened
    opens    markers that start a block. One without a special token counts only if nothing but
             blanks precedes it
    closes   markers that end a block: `closes[i]` ends `opens[i]` if it exists, else the first one
    inside   the prompt ends inside a block, which the first of `closes` ends

    A marker spelt with several tokens counts as thinking until it is complete.
    """

    most: int
    closes: list[str]
    opens: list[str] = []
    inside: bool = False


class _Body(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True, kw_only=True):
    """Base of all bodies."""


class JsonSchema(_Body, frozen=True, tag="json_schema", kw_only=True):
    """JSON that is valid under `text`, a JSON Schema (draft 2020-12) in JSON.

    Keywords that cannot be enforced are refused by name. Properties are written in the schema's
    order.
    """

    text: str


class JsonObject(_Body, frozen=True, tag="json_object", kw_only=True):
    """Any JSON object."""


class Regex(_Body, frozen=True, tag="regex", kw_only=True):
    """Text that fully matches `pattern` (syntax of Rust's regex crate; no look-around)."""

    pattern: str


class ChoiceGrammar(_Body, frozen=True, tag="choice", kw_only=True):
    """One of these texts."""

    choices: list[str]


class Lark(_Body, frozen=True, tag="lark", kw_only=True):
    """A context-free grammar in llguidance's dialect of Lark; the rule `start` is the body.

    `<[151657]>` and `<|python_tag|>` are tokens, by id and by name. `@name` refers to one of
    `schemas` (name -> JSON Schema in JSON), which is enforced as in `JsonSchema`.
    """

    text: str
    schemas: dict[str, str] = {}


class Gbnf(_Body, frozen=True, tag="gbnf", kw_only=True):
    """A context-free grammar in the GBNF of llama.cpp; the rule `root` is the body."""

    text: str


class Tag(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`begin`, then JSON that is valid under `schema`, then `end`."""

    begin: str
    schema: str
    end: str


class Structural(_Body, frozen=True, tag="structural", kw_only=True):
    """Free text with tags. A trigger must continue as one of the tags that start with it.

    at_least_one   the answer has at least one tag
    only_one       the answer ends with its first tag
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    only_one: bool = False


class _Form(msgspec.Struct, frozen=True, tag_field="form", omit_defaults=True):
    """Base of the forms that `Rules` are made of."""


class LiteralForm(_Form, frozen=True, tag="text"):
    """Exactly `text`, which may be empty. Markers in it are special tokens."""

    text: str


class Json(_Form, frozen=True, tag="json"):
    """JSON that is valid under `schemas[schema]` of the rules."""

    schema: str


class Pattern(_Form, frozen=True, tag="pattern"):
    """Text without markers that fully matches `pattern` (Rust's regex syntax)."""

    pattern: str


class Until(_Form, frozen=True, tag="until"):
    """Text without markers that matches `pattern`, up to and including the first `end` after it.
    `end` is not empty.
    """

    end: str
    pattern: str = "(?s:.*)"


class GrammarRule(_Form, frozen=True, tag="rule"):
    """The form `rules[rule]`. Rules may refer to themselves."""

    rule: str


class Sequence(_Form, frozen=True, tag="sequence"):
    """These forms one after the other."""

    items: list[Form]


class Either(_Form, frozen=True, tag="either"):
    """One of these forms."""

    options: list[Form]


class Repeat(_Form, frozen=True, tag="repeat"):
    """`item`, repeated from `least` to `most` times; None: without a limit."""

    item: Form
    least: int = 0
    most: int | None = None


Form = LiteralForm | Json | Pattern | Until | GrammarRule | Sequence | Either | Repeat


class Rules(_Body, frozen=True, tag="rules", kw_only=True):
    """A context-free grammar that is independent of the grammar library; `start` is the body.

    rules    name -> form, for `GrammarRule`
    schemas  name -> JSON Schema in JSON, enforced as in `JsonSchema`
    """

    start: Form
    rules: dict[str, Form] = {}
    schemas: dict[str, str] = {}


Body = JsonSchema | JsonObject | Regex | ChoiceGrammar | Lark | Gbnf | Structural | Rules


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The constraint on one answer.

    body           None: free text, with a budget
    before, after  fixed text around the body, after the thinking: markup that some models write
                   around every answer
    calls          tool calls in the model's own format, allowed in place of `before`, the body and
                   `after`
    """

    body: Body | None = None
    thinking: Thinking | None = None
    budget: ThinkingBudget | None = None
    before: str = ""
    after: str = ""
    calls: Rules | None = None
