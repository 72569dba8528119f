"""Grammars constrain an answer: a client writes one, and the engine enforces it token by token.

A `Grammar` describes the whole answer: optional thinking, then a body. The body starts exactly
where the thinking ends, so no second check beside the grammar can disagree with it. A
`ThinkingBudget` may be combined with a body. Without a body the answer is free text.

A marker (`Thinking.opens`, `Tag.begin`, `LiteralForm`, ...) is written as text. If part of it is a
special token of the vocabulary ("</think>", "<|channel|>"), only that token matches, never the same
letters spelt with other tokens; the engine does this lookup. Conversely, a special token is never
text: no string in a constrained answer can contain one.

`check_grammar` checks the bounds, not the decoder. So a grammar out of bounds only refuses its own
request.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from protocol.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 512 << 10
"""Total of all texts of a grammar: schemas, choices, markers."""
MAX_SYNTAX_CHARS = 64 << 10
"""In one regular expression, or in one grammar in Lark or GBNF."""
MAX_CHOICES = 4096
MAX_SCHEMAS = 1024
MAX_TAGS = 1024
MAX_FORMS = 16_384
"""Total of all rules of one grammar."""
MAX_FORM_DEPTH = 64
MAX_MARKERS = 32
"""In a thinking budget; every token is checked against each of them."""
MAX_MARKER_CHARS = 256


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
    """Text without markers that matches `pattern`, up to and including the first `end` after it."""

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


# ---- the bounds


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidRequest if a part is empty that must not be, or beyond the bounds above."""
    if grammar.thinking is not None:
        _check_thinking(grammar.thinking)
    if grammar.budget is not None:
        _check_budget(grammar.budget)
    if grammar.body is None:
        _check_free(grammar)
        return
    calls = grammar.calls
    texts = [*_texts(grammar.body), *(_texts(calls) if calls is not None else ())]
    size = sum(map(len, texts))
    if size > MAX_GRAMMAR_CHARS:
        raise _invalid(f"is {size:,} characters long; the limit is {MAX_GRAMMAR_CHARS:,}")
    match grammar.body:
        case Regex(pattern=text) | Lark(text=text) | Gbnf(text=text):
            _check_size("characters", len(text), MAX_SYNTAX_CHARS)
    if calls is not None:
        _check_rules(calls)
    match grammar.body:
        case ChoiceGrammar(choices=choices):
            _check_size("choices", len(choices), MAX_CHOICES)
        case Lark(schemas=schemas):
            _check_size("schemas", len(schemas), MAX_SCHEMAS, min_size=0)
        case Structural(triggers=triggers, tags=tags):
            _check_structural(triggers, tags)
        case Rules():
            _check_rules(grammar.body)


def forms_of(rules: Rules) -> Iterator[Form]:
    """Yield every form of all rules. Raises InvalidRequest if they are nested too deeply."""
    waiting = [(form, 1) for form in (rules.start, *rules.rules.values())]
    while waiting:
        form, depth = waiting.pop()
        if depth > MAX_FORM_DEPTH:
            raise _invalid(f"has forms nested more than {MAX_FORM_DEPTH} deep")
        yield form
        match form:
            case Sequence(inner) | Either(inner):
                waiting += [(one, depth + 1) for one in inner]
            case Repeat(one):
                waiting.append((one, depth + 1))


def _texts(body: Body) -> list[str]:
    match body:
        case Rules():
            return [*map(_form_text, forms_of(body)), *body.schemas, *body.schemas.values()]
        case JsonSchema(text=text) | Regex(pattern=text) | Gbnf(text=text):
            return [text]
        case JsonObject():
            return []
        case ChoiceGrammar(choices=choices):
            return choices
        case Lark(text=text, schemas=schemas):
            return [text, *schemas, *schemas.values()]
        case Structural(triggers=triggers, tags=tags):
            return [*triggers, *(part for tag in tags for part in (tag.begin, tag.schema, tag.end))]


def _check_thinking(thinking: Thinking) -> None:
    if not thinking.closes:
        raise _invalid("has thinking without a closing marker")
    if not thinking.opens and not thinking.inside:
        raise _invalid("has thinking without an opening marker")


def _check_budget(budget: ThinkingBudget) -> None:
    _check_size("thinking markers", len(budget.closes) + len(budget.opens), MAX_MARKERS)
    if budget.most < 0:
        raise _invalid(f"has a thinking budget of {budget.most} tokens")
    if not budget.closes or not all((*budget.closes, *budget.opens)):
        raise _invalid("has a thinking budget without a closing marker")
    if not budget.opens and not budget.inside:
        raise _invalid("has a thinking budget without an opening marker")
    if (longest := max(map(len, (*budget.closes, *budget.opens)))) > MAX_MARKER_CHARS:
        raise _invalid(f"has a marker of {longest:,} characters; the limit is {MAX_MARKER_CHARS}")


def _check_free(grammar: Grammar) -> None:
    if grammar.budget is None:
        raise _invalid("has neither a body nor a thinking budget")
    if grammar.thinking or grammar.before or grammar.after or grammar.calls:
        raise _invalid("has no body, but thinking, before, after or calls, which need one")


def _check_structural(triggers: list[str], tags: list[Tag]) -> None:
    _check_size("triggers", len(triggers), MAX_TAGS)
    _check_size("tags", len(tags), MAX_TAGS)
    if "" in triggers:
        raise _invalid("has an empty trigger")
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise _invalid(f"has no tag that starts with the trigger {trigger!r}")
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise _invalid(f"has no trigger for the tag {tag.begin!r}")


def _form_text(form: Form) -> str:
    match form:
        case LiteralForm(text) | Pattern(text):
            return text
        case Until(end, pattern):
            return end + pattern
    return ""


def _check_rules(rules: Rules) -> None:
    _check_size("forms", sum(1 for _ in forms_of(rules)), MAX_FORMS)
    _check_size("schemas", len(rules.schemas), MAX_SCHEMAS, min_size=0)
    for form in forms_of(rules):
        match form:
            case Json(name) if name not in rules.schemas:
                raise _invalid(f"has no schema {name!r}")
            case GrammarRule(name) if name not in rules.rules:
                raise _invalid(f"has no rule {name!r}")
            case Until(""):
                raise _invalid("has an until form with an empty end")
            case Either([]):
                raise _invalid("has an either form without options")
            case Repeat(_, least, most) if least < 0 or (most is not None and most < max(least, 1)):
                raise _invalid(f"has a form repeated from {least} to {most} times")


def _check_size(items: str, size: int, max_size: int, *, min_size: int = 1) -> None:
    if not min_size <= size <= max_size:
        raise _invalid(f"has {size:,} {items}; it must have from {min_size} to {max_size:,}")


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar {problem}", param="grammar")
