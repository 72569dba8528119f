"""Hugging Face's dialect of Jinja, in Jinja's immutable sandbox.

Jinja's sandbox prevents a template from accessing Python's internal attributes and from changing
variables. It bounds neither time nor memory. So templates that models and requests contain are
compiled and rendered in a process with hard limits (`gateway.sandbox`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Now = Callable[[], datetime]


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders templates as Hugging Face's transformers does.

    now  returns the current local time, for the template function `strftime_now`
    """

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


class GenerationTag(Extension):
    """Parses `{% generation %}` blocks, which mark the model's text for training. When rendered,
    such a block is only a scope for variables."""

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
    """Return `value` as JSON, like Hugging Face's filter. Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
