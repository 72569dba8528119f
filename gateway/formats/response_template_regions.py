"""The regions of a checkpoint's `response_template`, and the patterns that open them.

A pattern is a regular expression made of a few kinds of parts, the atoms, which
`response_template_loader` lists. Answers are matched against it, and grammars write texts that
match it.
"""

from __future__ import annotations

import re

import msgspec

from gateway.formats.call_parser import CallSyntax

CLASS = r"(?:\\[wSd]|\[\^?(?:\\.|[^\]\\])+\])"
ATOM = re.compile(
    rf"""
    (?P<group>\(\?P<\w+>(?P<of>{CLASS})\+\))
  | (?P<class>{CLASS}[*+]\??|\.[*+]\??)
  | (?P<blank>(?:\\[snt]|[ ])[*+?]\??)
  | (?P<bound>\\b)
  | \\(?P<control>[nt])
  | \\(?P<escaped>[^\w\s])
  | (?P<plain>[^\\\[\](){{}}.*+?|^$])
    """,
    re.VERBOSE,
)
CONTROL = {"n": "\n", "t": "\t"}


class RegionOpening(msgspec.Struct, frozen=True):
    """One way to open a region.

    literal   text that is searched for
    pattern   matches the whole opening, including the literal; "" if the literal is the whole
              opening
    until     the literal that ends the opening; "" if a group ends it
    last      the character class of the group that ends the opening
    at_start  whether the region is open from the start of the answer, without any text
    """

    literal: str = ""
    pattern: str = ""
    until: str = ""
    last: str = ""
    at_start: bool = False

    def head_end(self, text: str) -> int | None:
        """Return the length of the rest of the opening, where `text` is what follows its literal.
        Return None if the opening's end is not in `text` yet, so more text is needed."""
        if self.until:
            found = text.find(self.until)
            return found + len(self.until) if found >= 0 else None
        other = re.search(rf"(?!{self.last}).", text, re.DOTALL)
        return other.start() if other else None

    def written(self, name: str) -> list[str | None]:
        """Return the literal texts of this opening, in order, with `name` as the tool's name. None
        stands for a class of characters between them.

        Raise ValueError if the pattern's group does not match the name.
        """
        if not self.pattern:
            return [self.literal]
        atoms = pattern_atoms(self.pattern, self.pattern)
        parts: list[str | None] = []
        for n, atom in enumerate(atoms):
            is_bound = [bool(a["bound"]) for a in (atoms[n - 1], atom, atoms[(n + 1) % len(atoms)])]
            if atom["class"] and is_bound[0] and is_bound[2]:
                parts.append(" ")
            elif not is_bound[1]:
                parts.append(_written(atom, name))
        return parts

    def captures(self, head: str) -> dict[str, str] | None:
        """Match a whole opening, `literal` followed by `head`, against `pattern`. Return its named
        groups; None if there is no match."""
        found = re.fullmatch(self.pattern, self.literal + head, re.DOTALL)
        return found.groupdict() if found else None


class TemplateRegion(msgspec.Struct, frozen=True):
    """A kind of region in an answer, which the template calls a field: reasoning, text or tool
    calls.

    kind   "thinking", "content" or "tool_calls"
    open   ways to open the region; if empty, the region is all text outside the other regions
    close  literals that close the region; if empty, it lasts to the end of the answer
    calls  the syntax of the calls in a "tool_calls" region
    name   the pattern's group that matches the tool's name; "" if the body of a call has the name
    """

    kind: str
    open: tuple[RegionOpening, ...] = ()
    close: tuple[str, ...] = ()
    calls: CallSyntax | None = None
    name: str = ""

    def literals(self) -> tuple[str, ...]:
        """Return the texts that open and close the field."""
        return (*(opening.literal for opening in self.open if opening.literal), *self.close)


def pattern_atoms(pattern: str, whole: str) -> list[re.Match[str]]:
    """Return the parts of a regular expression: each is one match of ATOM. Raise ValueError if a
    part is not supported. The message quotes `whole`, of which `pattern` is a part."""
    atoms, at = [], 0
    while at < len(pattern):
        atom = ATOM.match(pattern, at)
        if atom is None:
            raise ValueError(f"the pattern {whole!r} is not supported at {pattern[at:]!r}")
        atoms.append(atom)
        at = atom.end()
    return atoms


def _written(atom: re.Match[str], name: str) -> str | None:
    """Return the text of an atom, with `name` for a group; None for a class of characters."""
    if atom["group"]:
        if not re.fullmatch(f"{atom['of']}+", name):
            raise ValueError(f"{name!r} does not match {atom['of']}")
        return name
    if atom["blank"]:
        return " " if atom["blank"][0] in " [" else "\n"
    return atom_letter(atom)


def atom_letter(atom: re.Match[str]) -> str | None:
    """Return the character that an atom stands for, or None if it may stand for several."""
    return CONTROL.get(atom["control"] or "") or atom["escaped"] or atom["plain"]
