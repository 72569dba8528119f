"""Grammars, which constrain answers: a client writes one, and the engine enforces it at each token.

A `Grammar` describes the whole answer: optional thinking, then a body. The grammar itself defines
where the thinking ends and the body starts, so no other code has to detect that. A `ThinkingBudget`
may be combined with a body. Without a body the answer is free text.

A marker (`Thinking.opens`, `Tag.begin`, `LiteralForm`, ...) is written as text. If part of a marker
is a special token of the vocabulary ("</think>", "<|channel|>"), only that token matches, never the
same letters spelt with other tokens. The engine looks these tokens up. Conversely, no string in a
constrained answer can contain a special token.

The bounds below are checked by `check_grammar`, not while decoding the message. So a grammar beyond
them is an error of its request, not a malformed message.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from protocol.wire.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 512 << 10
"""Most characters in all texts of one grammar together: schemas, choices, markers."""
MAX_SYNTAX_CHARS = 64 << 10
"""Most characters in one regular expression, in one grammar in Lark or GBNF, or in all texts and
patterns of `Rules` together."""
MAX_LITERAL_CHARS = 16 << 10
"""Most characters in one literal: a choice, a marker, a form, the text before or after a body, or a
value, pattern or property name of a JSON Schema. A compiled literal takes half a kilobyte for each
of its characters."""
MAX_CHOICES = 4096
MAX_SCHEMAS = 1024
MAX_TAGS = 1024
MAX_FORMS = 16_384
"""Most forms in all rules of one grammar together."""
MAX_FORM_DEPTH = 64
MAX_MARKERS = 32
"""Most markers in a thinking budget. Each token is compared with every marker."""
MAX_MARKER_CHARS = 256


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Thinking before the body: blocks of free text between two markers. White space may follow
    each block.

    opens      the marker that starts a block; "" if only the chat template writes this marker, so
               the answer cannot start another block
    closes     the marker that ends a block
    inside     the prompt ends inside a block, so the answer starts with the rest of that block
    optional   the answer may start with the body, without thinking; ignored if `inside`
    """

    closes: str
    opens: str = ""
    inside: bool = False
    optional: bool = False


class ThinkingBudget(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A limit on the thinking tokens of an answer, in all its blocks together. At the limit the
    engine writes the closing marker, token by token, and the model continues after the marker.

    most     largest number of tokens; 0: a block is closed as soon as it is opened
    opens    markers that start a block. A marker without a special token starts a block only at
             the start of the answer or after another block, apart from white space
    closes   markers that end a block: `closes[i]` ends a block that `opens[i]` started; if there is
             no `closes[i]`, `closes[0]` does
    inside   the prompt ends inside a block, and `closes[0]` ends that block

    If a closing marker is spelt with several tokens, all of them except the last count as thinking.
    """

    most: int
    closes: list[str]
    opens: list[str] = []
    inside: bool = False


class _Body(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True, kw_only=True):
    """Base of the possible bodies of a grammar."""


class JsonSchema(_Body, frozen=True, tag="json_schema", kw_only=True):
    """JSON that is valid under `text`, a JSON Schema (draft 2020-12) in JSON.

    A schema with a keyword that cannot be enforced is refused, and the error names the keyword. The
    answer has its properties in the order of the schema.
    """

    text: str


class JsonObject(_Body, frozen=True, tag="json_object", kw_only=True):
    """Any JSON object."""


class Regex(_Body, frozen=True, tag="regex", kw_only=True):
    """Text that matches `pattern` as a whole (syntax of Rust's regex crate; no look-around)."""

    pattern: str


class ChoiceGrammar(_Body, frozen=True, tag="choice", kw_only=True):
    """One of the texts in `choices`."""

    choices: list[str]


class Lark(_Body, frozen=True, tag="lark", kw_only=True):
    """A context-free grammar in llguidance's dialect of Lark; the rule `start` is the body.

    In the grammar, `<[151657]>` is a token by its id, and `<|python_tag|>` a special token by its
    name. `@name` is JSON that is valid under `schemas[name]`, as in `JsonSchema`.
    """

    text: str
    schemas: dict[str, str] = {}


class Gbnf(_Body, frozen=True, tag="gbnf", kw_only=True):
    """A context-free grammar in the GBNF of llama.cpp; the rule `root` is the body."""

    text: str


class Tag(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The text `begin`, JSON that is valid under the JSON Schema `schema`, and the text `end`."""

    begin: str
    schema: str
    end: str


class Structural(_Body, frozen=True, tag="structural", kw_only=True):
    """Free text with tags. After one of `triggers`, the text must continue as one of the tags whose
    `begin` starts with that trigger.

    at_least_one   the answer has at least one tag
    only_one       the answer ends with its first tag
    """

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    only_one: bool = False


class _Form(msgspec.Struct, frozen=True, tag_field="form", omit_defaults=True):
    """Base of the forms of a grammar in `Rules`."""


class LiteralForm(_Form, frozen=True, tag="text"):
    """Exactly `text`, which may be empty. Special tokens in `text` match only as these tokens."""

    text: str


class Json(_Form, frozen=True, tag="json"):
    """JSON that is valid under `Rules.schemas[schema]`."""

    schema: str


class Pattern(_Form, frozen=True, tag="pattern"):
    """Text without special tokens that matches `pattern` as a whole (Rust's regex syntax)."""

    pattern: str


class Until(_Form, frozen=True, tag="until"):
    """Text without special tokens that matches `pattern`, up to and including the first `end`.

    but_not  patterns that this text does not match as a whole
    then     pattern of further text between this text and `end`
    """

    end: str
    pattern: str = "(?s:.*)"
    but_not: tuple[str, ...] = ()
    then: str = ""


class GrammarRule(_Form, frozen=True, tag="rule"):
    """The form `Rules.rules[rule]`. A rule may refer to itself."""

    rule: str


class Sequence(_Form, frozen=True, tag="sequence"):
    """All forms in `items`, one after the other."""

    items: list[Form]


class Either(_Form, frozen=True, tag="either"):
    """One of the forms in `options`."""

    options: list[Form]


class Repeat(_Form, frozen=True, tag="repeat"):
    """The form `item`, from `least` to `most` times. If `most` is None, there is no upper limit."""

    item: Form
    least: int = 0
    most: int | None = None


Form = LiteralForm | Json | Pattern | Until | GrammarRule | Sequence | Either | Repeat


class Rules(_Body, frozen=True, tag="rules", kw_only=True):
    """A context-free grammar in our own structs, for any grammar library; `start` is the body.

    rules    name -> form, for `GrammarRule`
    schemas  name -> JSON Schema in JSON, enforced as in `JsonSchema`
    """

    start: Form
    rules: dict[str, Form] = {}
    schemas: dict[str, str] = {}


Body = JsonSchema | JsonObject | Regex | ChoiceGrammar | Lark | Gbnf | Structural | Rules


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The constraint on one answer.

    body           None: free text, in which `budget` limits the thinking
    before, after  fixed text before and after the body (`before` follows the thinking): markup that
                   some models write around every answer
    calls          tool calls in the model's own format: a second possibility, in place of `before`,
                   the body and `after`
    """

    body: Body | None = None
    thinking: Thinking | None = None
    budget: ThinkingBudget | None = None
    before: str = ""
    after: str = ""
    calls: Rules | None = None


# ---- the bounds


def num_chars(grammar: Grammar) -> int:
    """Return the number of characters in all texts of a grammar together."""
    bodies = (grammar.body, grammar.calls)
    texts = [text for body in bodies if body is not None for text in _texts(body)]
    return sum(map(len, (grammar.before, grammar.after, *texts)))


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidRequest if `grammar` is incomplete, inconsistent or too large (MAX_*).

    The literals inside JSON Schemas are not checked, because finding them takes milliseconds: see
    `schema_literals.py`.
    """
    if grammar.thinking is not None:
        _check_thinking(grammar.thinking)
    if grammar.budget is not None:
        _check_budget(grammar.budget)
    if grammar.body is None:
        _check_free(grammar)
        return
    if (size := num_chars(grammar)) > MAX_GRAMMAR_CHARS:
        raise _invalid(f"is {size:,} characters long; the limit is {MAX_GRAMMAR_CHARS:,}")
    _check_literal("before", grammar.before)
    _check_literal("after", grammar.after)
    if grammar.calls is not None:
        _check_rules(grammar.calls)
    match grammar.body:
        case Regex(pattern=text) | Gbnf(text=text):
            _check_size("characters", len(text), MAX_SYNTAX_CHARS)
        case Lark(text=text, schemas=schemas):
            _check_size("characters", len(text), MAX_SYNTAX_CHARS)
            _check_size("schemas", len(schemas), MAX_SCHEMAS, min_size=0)
        case ChoiceGrammar(choices=choices):
            _check_size("choices", len(choices), MAX_CHOICES)
            for number, choice in enumerate(choices):
                _check_literal(f"choices[{number}]", choice)
        case Structural(triggers=triggers, tags=tags):
            _check_structural(triggers, tags)
        case Rules():
            _check_rules(grammar.body)


def forms_of(rules: Rules) -> Iterator[Form]:
    """Yield all forms of `rules`, nested ones too. Raises InvalidRequest if any is too deep."""
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
    for number, trigger in enumerate(triggers):
        _check_literal(f"triggers[{number}]", trigger)
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise _invalid(f"has no tag that starts with the trigger {trigger!r}")
    for number, tag in enumerate(tags):
        _check_literal(f"tags[{number}].begin", tag.begin)
        _check_literal(f"tags[{number}].end", tag.end)
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise _invalid(f"has no trigger for the tag {tag.begin!r}")


def _form_text(form: Form) -> str:
    match form:
        case LiteralForm(text) | Pattern(text):
            return text
        case Until(end, pattern, but_not, then):
            return "".join((end, pattern, *but_not, then))
    return ""


def _check_rules(rules: Rules) -> None:
    _check_size("forms", sum(1 for _ in forms_of(rules)), MAX_FORMS)
    _check_size("schemas", len(rules.schemas), MAX_SCHEMAS, min_size=0)
    size = sum(len(_form_text(form)) for form in forms_of(rules))
    _check_size("characters", size, MAX_SYNTAX_CHARS, min_size=0)
    for form in forms_of(rules):
        _check_literal("a form", _form_text(form))
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


def _check_literal(name: str, text: str) -> None:
    if len(text) > MAX_LITERAL_CHARS:
        raise _invalid(
            f"has a literal of {len(text):,} characters ({name}); the limit is "
            f"{MAX_LITERAL_CHARS:,}"
        )


def _check_size(items: str, size: int, max_size: int, *, min_size: int = 1) -> None:
    if not min_size <= size <= max_size:
        raise _invalid(f"has {size:,} {items}; it must have from {min_size} to {max_size:,}")


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar {problem}", param="grammar")
