"""Checks the bounds of a grammar before it is compiled. Errors are one line and name the
problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.errors import InvalidRequest
from protocol.grammar import (
    Body,
    ChoiceGrammar,
    Either,
    Form,
    Gbnf,
    Grammar,
    GrammarRule,
    Json,
    JsonObject,
    JsonSchema,
    Lark,
    LiteralForm,
    Pattern,
    Regex,
    Repeat,
    Rules,
    Sequence,
    Structural,
    Tag,
    Thinking,
    ThinkingBudget,
    Until,
)

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
