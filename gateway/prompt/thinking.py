"""The thinking options of a chat template, read from its source once.

A template may have a switch (`enable_thinking`, `thinking`), a mode with words of its own
(`thinking_mode`), and an effort (`reasoning_effort`). Its undeclared variables show which of them
it reads; its comparisons show which words.
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
"""How templates spell the two modes. A template that compares with only one of the two treats any
other word as the other mode, so the first word works."""


class ThinkingProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The thinking options that a template reads.

    switches     names of on/off switches
    mode         (word for on, word for off) of `thinking_mode`; None: it is not read
    mode_words   all words that the mode is compared with
    reads_effort whether `reasoning_effort` is read
    efforts      words that the effort is compared with; empty: any word works
    """

    switches: tuple[str, ...] = ()
    mode: tuple[str, str] | None = None
    mode_words: tuple[str, ...] = ()
    reads_effort: bool = False
    efforts: tuple[str, ...] = ()

    @property
    def has_switch(self) -> bool:
        return bool(self.switches) or self.mode is not None


def thinking_profile(source: str | None) -> ThinkingProfile:
    """Return a template's profile; an empty one if there is no template or it does not compile."""
    try:
        tree = ChatEnvironment().parse(source or "")
        mode_words, efforts = _words(tree, MODE), _words(tree, EFFORT)
        names = meta.find_undeclared_variables(tree)  # last: it rewrites the tree
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
    return next((word for word in preferred if word in words), preferred[0])


def _words(tree: nodes.Template, name: str) -> tuple[str, ...]:
    """Return the strings that a variable, or an alias of it, is compared with, in order."""
    names = _aliases(tree, name)
    found: list[str] = []
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_is_about(side, names) for side in sides):
            found += [word for side in sides for word in _texts(side)]
    return tuple(dict.fromkeys(found))


def _aliases(tree: nodes.Template, name: str) -> frozenset[str]:
    names = {name}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_about(assign.node, frozenset(names)):
            names.add(assign.target.name)
    return frozenset(names)


def _is_about(node: nodes.Node | None, names: frozenset[str]) -> bool:
    """Return whether `node` is one of these variables, possibly filtered or with a default."""
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
    match node:
        case nodes.Const(value=str(text)):
            yield text
        case nodes.List(items=items) | nodes.Tuple(items=items):
            for item in items:
                yield from _texts(item)
