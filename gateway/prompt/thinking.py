"""Finds the thinking options of a chat template in its source.

A template may read three kinds of variables: an on/off switch (`enable_thinking`, `thinking`), a
mode whose values are words (`thinking_mode`), and an effort (`reasoning_effort`). The template's
undeclared variables show which of these it reads. The comparisons in its source show which words it
distinguishes.
"""

from __future__ import annotations

from collections.abc import Iterator

import jinja2
import msgspec
from jinja2 import meta, nodes

from gateway.prompt.environment import ChatEnvironment

SWITCHES = ("enable_thinking", "thinking")
MODE, EFFORT = "thinking_mode", "reasoning_effort"
ON_WORDS = ("enabled", "on", "thinking", "think", "true", "enable")
OFF_WORDS = ("disabled", "off", "chat", "none", "no_think", "non-thinking", "false", "disable")
"""Words by which templates name the two modes. If a template compares with a word of one mode only,
any other word selects the other mode. In that case the first word of the other mode is used."""


class ThinkingProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The thinking options that a template reads."""

    #: Names of the on/off switches.
    switches: tuple[str, ...] = ()
    #: The words for on and for off in `thinking_mode`; None: the template does not read it.
    mode: tuple[str, str] | None = None
    #: All words that `thinking_mode` is compared with.
    mode_words: tuple[str, ...] = ()
    #: Whether the template reads `reasoning_effort`.
    reads_effort: bool = False
    #: The words that `reasoning_effort` is compared with; empty: any word works.
    efforts: tuple[str, ...] = ()

    @property
    def has_switch(self) -> bool:
        """Whether thinking can be turned on and off by a switch or by the mode."""
        return bool(self.switches) or self.mode is not None


def thinking_profile(source: str | None) -> ThinkingProfile:
    """Return the thinking options of a template. The profile is empty if there is no template
    (`source` is None) or it does not compile."""
    if not any(name in (source or "") for name in (*SWITCHES, MODE, EFFORT)):
        return ThinkingProfile()  # parsing takes as long as a third of loading a template
    try:
        tree = ChatEnvironment().parse(source or "")
        mode_words, efforts = _words(tree, MODE), _words(tree, EFFORT)
        names = meta.find_undeclared_variables(tree)  # called last, because it changes the tree
    except (jinja2.TemplateError, RecursionError):
        return ThinkingProfile()
    both = (_one_of(ON_WORDS, mode_words), _one_of(OFF_WORDS, mode_words))
    return ThinkingProfile(
        switches=tuple(name for name in SWITCHES if name in names),
        mode=both if MODE in names else None,
        mode_words=mode_words if MODE in names else (),
        reads_effort=EFFORT in names,
        efforts=efforts if EFFORT in names else (),
    )


def _one_of(preferred: tuple[str, ...], words: tuple[str, ...]) -> str:
    """Return the first preferred word that is one of `words`, or else the first preferred word."""
    return next((word for word in preferred if word in words), preferred[0])


def _words(tree: nodes.Template, name: str) -> tuple[str, ...]:
    """Return the strings that the variable `name`, or an alias of it, is compared with. They are in
    the order of their first occurrence."""
    names = _aliases(tree, name)
    found: list[str] = []
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_is_about(side, names) for side in sides):
            found += [word for side in sides for word in _texts(side)]
    return tuple(dict.fromkeys(found))


def _aliases(tree: nodes.Template, name: str) -> frozenset[str]:
    """Return `name` and the names of all variables that the template assigns from it."""
    names = {name}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_about(assign.node, frozenset(names)):
            names.add(assign.target.name)
    return frozenset(names)


def _is_about(node: nodes.Node | None, names: frozenset[str]) -> bool:
    """Return whether the value of the expression `node` comes from one of these variables, directly
    or through filters, method calls, conditionals or a default."""
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Filter(node=inner):
            return _is_about(inner, names)
        case nodes.Call(node=nodes.Getattr(node=inner)):  # reasoning_effort.lower()
            return _is_about(inner, names)
        case nodes.CondExpr(expr1=one, expr2=other) | nodes.Or(left=one, right=other):
            return _is_about(one, names) or _is_about(other, names)
    return False


def _texts(node: nodes.Node) -> Iterator[str]:
    """Yield the string constants in an operand: the constant itself, or the items of a list."""
    match node:
        case nodes.Const(value=str(text)):
            yield text
        case nodes.List(items=items) | nodes.Tuple(items=items):
            for item in items:
                yield from _texts(item)
