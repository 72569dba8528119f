"""Where chat templates run: Hugging Face's dialect of Jinja, with every step counted.

A template comes with the model's files, and model files come from anywhere. So it runs in Jinja's
immutable sandbox (no attribute of Python's own, nothing it is given can be changed) and under a
`Budget`. Bounded are:

- steps: each item of each loop, each operator that can make something large, and each call of a
  function, macro or method is one, and at each one the clock is looked at; so loops that write
  nothing end too;
- `range` (100,000 numbers, Jinja's own bound), and recursion, by Python's limit;
- what is written in all, into the prompt, a macro's result or a variable;
- the size of every string or list made by `+`, `~`, `*`, `%` or a call; of `*`, `**`, `replace`,
  `join`, paddings and formats before it is made.

Not bounded is what one call of any other built-in filter does with values that are themselves
within these bounds: a `sort` of the largest list may take a second or two before the clock is
looked at again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OUTPUT_CHARS = 16_000_000
MAX_STEPS = 1_000_000
MAX_SECONDS = 2.0
MAX_WIDTH = 10_000
MAX_INT_BITS = 10_000
_WIDE_FORMAT = re.compile(r"%[-+ #0]*(\d{5}|\*|\d*\.(\d{5}|\*))|\{[^{}]*(\d{5}|\{)")

_GROWING = (
    "batch",
    "center",
    "format",
    "indent",
    "join",
    "replace",
    "round",
    "slice",
    "wordwrap",
)
"""Filters of Jinja's that can make much out of little."""

_BUDGET = " budget"
_COUNTED = " counted"
_SIZED = " sized"
_WRITTEN = " written"
"""Names with a blank: no template can spell them."""

Now = Callable[[], datetime]


class BudgetExceeded(jinja2.TemplateError):
    """The template took too long or wrote too much."""


class Budget:
    """What one rendering may still use. `clock` counts seconds."""

    def __init__(
        self,
        *,
        max_chars: int = MAX_OUTPUT_CHARS,
        max_steps: int = MAX_STEPS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chars = max_chars
        self._max_chars = max_chars
        self._steps = max_steps
        self._clock = clock
        self._deadline = clock() + max_seconds

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise BudgetExceeded("the chat template takes too many steps")
        self.look()

    def look(self) -> None:
        if self._clock() > self._deadline:
            raise BudgetExceeded("the chat template takes too long")

    def write(self, piece: str) -> None:
        self._chars -= len(piece)
        if self._chars < 0:
            raise BudgetExceeded("the chat template writes too much")

    def check_size(self, size: int) -> None:
        if size > self._max_chars:
            raise BudgetExceeded("the chat template makes a value that is too large")

    def sized(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            self.check_size(len(value))
        return value


def budget_of(context: Context) -> Budget:
    budget: Budget = context.parent[_BUDGET]
    return budget


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs templates as Hugging Face does, counting steps."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Now = datetime.now) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.filters["tojson"] = _tojson
        for name in _GROWING:
            self.filters[name] = _checked(name, self.filters[name])
        self.filters[_COUNTED] = _counted
        self.filters[_SIZED] = _sized
        self.filters[_WRITTEN] = _written

    def template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError."""
        tree = Counting().visit(self.parse(source))
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.step()
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str):
            check_growth(budget, function.__name__, text, [*args, *kwargs.values()])
        return budget.sized(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        budget.step()
        if operator in ("*", "**"):
            _check_product(budget, operator, left, right)
        elif operator == "%" and isinstance(left, str):
            check_growth(budget, "format", left, [])
        return budget.sized(super().call_binop(context, operator, left, right))


def run(template: jinja2.Template, variables: dict[str, Any], budget: Budget) -> str:
    """Render within the budget. Raises jinja2.TemplateError, or whatever the template's code
    raises."""
    context = template.new_context({**variables, _BUDGET: budget})
    pieces = []
    for piece in template.root_render_func(context):
        budget.look()
        pieces.append(piece)
    return "".join(pieces)


class Counting(NodeTransformer):
    """Rewrites a template so that each item of a loop is one step, each `a ~ b` is measured, and
    each bit of output is counted wherever it goes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SIZED)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(bit, _WRITTEN) for bit in node.nodes]
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = budget_of(context)
    for item in items:
        budget.step()
        yield item


@jinja2.pass_context
def _sized(context: Context, value: Any) -> Any:
    return budget_of(context).sized(value)


@jinja2.pass_context
def _written(context: Context, value: Any) -> str:
    text = str(value)
    budget_of(context).write(text)
    return text


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for those who train on it; here it is only a
    scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's: Jinja's own would escape for HTML."""
    _check_widths([indent])
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's, whose growth is checked like that of the method of the same name."""
    wants = getattr(function, "jinja_pass_arg", None)

    def _first(context: Context) -> tuple[Any, ...]:
        if wants is None:
            return ()
        return (context.eval_ctx if wants.name == "eval_context" else context.environment,)

    @jinja2.pass_context
    def checked(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.step()
        if name == "join":
            value = list(value)
            separator = str(args[0] if args else kwargs.get("d", ""))
            budget.check_size(len(separator) * len(value))
        elif isinstance(value, str):
            check_growth(budget, name, value, [*args, *kwargs.values()])
        else:
            _check_widths([*args, *kwargs.values()])
        return budget.sized(function(*_first(context), value, *args, **kwargs))

    return checked


def check_growth(budget: Budget, method: str, text: str, args: Sequence[Any]) -> None:
    """Refuse `text.method(*args)` where the result would be too large to be made and looked at."""
    if method in ("format", "format_map"):
        if _WIDE_FORMAT.search(text):
            raise BudgetExceeded("the chat template formats with a width that is too large")
    elif method == "replace":
        old, new = [*map(str, args[:2]), "", ""][:2]
        budget.check_size(len(text) + text.count(old) * len(new))
    elif method == "join" and args and isinstance(args[0], Sized):
        budget.check_size(len(text) * len(args[0]))
    else:
        _check_widths(args)


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > MAX_WIDTH:
            raise BudgetExceeded(f"the chat template pads to more than {MAX_WIDTH} characters")


def _check_product(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Refuse `left * right` or `left ** right` where the result would be too large to be made."""
    if isinstance(left, int) and isinstance(right, int):
        bits, other = left.bit_length(), right.bit_length()
        if (bits * right if operator == "**" else bits + other) > MAX_INT_BITS:
            raise BudgetExceeded("the chat template makes a number that is too large")
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            budget.check_size(len(value) * times)
