r"""The patterns of response templates that can be searched for in linear time, as data.

A checkpoint's template may describe where a region opens or closes with a regular expression. Those
in use are mostly a literal with a name after it: `<tool_call>\s*<function=(?P<name>\w+)>`. A
pattern is supported if each of its alternatives is

    a literal; optional blanks; named groups and repeated classes of characters; a literal

where the last literal may only be missing after a group. The first literal is searched for like any
marker. Only the text between it and the last one is matched, once, and that text is bounded. An
unsupported pattern is refused when the template is loaded, never when an answer is read.
"""

from __future__ import annotations

import re

import msgspec

MAX_HEAD_CHARS = 256
"""A match is at most this many characters longer than its first literal."""

MAX_REPEATS = 4

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

    literal   searched for in the text
    pattern   matches all of it, the literal included; "" if the literal is all
    until     the literal that ends it; "" if it ends with a group
    last      the class of characters of that group
    at_start  it stands at the start of the answer, and has no letters
    """

    literal: str = ""
    pattern: str = ""
    until: str = ""
    last: str = ""
    at_start: bool = False

    def head_end(self, text: str) -> int | None:
        """Return where the match ends in the text after the literal, or None if that is still to
        come.
        """
        if self.until:
            found = text.find(self.until)
            return found + len(self.until) if found >= 0 else None
        other = re.search(rf"(?!{self.last}).", text, re.DOTALL)
        return other.start() if other else None

    def written(self, name: str) -> list[str | None]:
        """Return its parts with `name` for its group: texts, and None for a class of characters.

        Raise ValueError if the group does not match the name.
        """
        if not self.pattern:
            return [self.literal]
        atoms = _atoms(self.pattern, self.pattern)
        parts: list[str | None] = []
        for n, atom in enumerate(atoms):
            is_bound = [bool(a["bound"]) for a in (atoms[n - 1], atom, atoms[(n + 1) % len(atoms)])]
            if atom["class"] and is_bound[0] and is_bound[2]:
                parts.append(" ")
            elif not is_bound[1]:
                parts.append(_written(atom, name))
        return parts

    def captures(self, head: str) -> dict[str, str] | None:
        """Return the named groups, given the text `head` after the literal; None if it does not
        match.
        """
        found = re.fullmatch(self.pattern, self.literal + head, re.DOTALL)
        return found.groupdict() if found else None


def openings(pattern: str) -> tuple[RegionOpening, ...]:
    """Return the alternatives of `pattern`. Raise ValueError with the reason if it is not
    supported.
    """
    return tuple(_opening(alternative, pattern) for alternative in alternatives(pattern))


def closings(pattern: str) -> tuple[str, ...]:
    """Return the literals of a pattern that closes a region: several literals, or the end of the
    answer.
    """
    found = [_opening(part, pattern) for part in alternatives(pattern) if part not in ("$", r"\Z")]
    for opening in found:
        if opening.pattern or not opening.literal:
            raise ValueError(f"the pattern {pattern!r} closes a region with more than a literal")
    return tuple(opening.literal for opening in found)


def alternatives(pattern: str) -> list[str]:
    """Return the pattern split at each `|` outside of brackets."""
    if pattern.startswith("(?:") and _closes_at(pattern) == len(pattern) - 1:
        return alternatives(pattern[3:-1])
    parts, start, depth, in_class = [], 0, 0, False
    for at, char in _unescaped(pattern):
        in_class = char == "[" or (in_class and char != "]")
        if not in_class:
            depth += (char == "(") - (char == ")")
            if char == "|" and depth == 0:
                parts.append(pattern[start:at])
                start = at + 1
    return [*parts, pattern[start:]]


def _unescaped(pattern: str) -> list[tuple[int, str]]:
    found, at = [], 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        else:
            found.append((at, pattern[at]))
        at += 1
    return found


def _closes_at(pattern: str) -> int:
    """Return where the parenthesis at the start of the pattern is closed."""
    depth = 0
    for at, char in _unescaped(pattern):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at
    return -1


def _opening(pattern: str, whole: str) -> RegionOpening:
    if pattern in ("^", r"\A"):
        return RegionOpening(at_start=True)
    atoms = _atoms(pattern, whole)
    while atoms and atoms[0].lastgroup == "blank":
        atoms.pop(0)
    while atoms and atoms[-1].lastgroup == "blank":
        atoms.pop()
    letters = [_letter(atom) for atom in atoms]
    first = next((n for n, letter in enumerate(letters) if letter is None), len(letters))
    literal = "".join(letter or "" for letter in letters[:first])
    if not literal:
        raise ValueError(f"the pattern {whole!r} does not begin with a literal")
    if first == len(letters):
        return RegionOpening(literal)
    behind = next(n for n in range(len(letters), 0, -1) if letters[n - 1] is None)
    until = "".join(letter or "" for letter in letters[behind:])
    last = atoms[-1]["of"] or ""
    if not until and not last:
        raise ValueError(f"the pattern {whole!r} ends with neither a literal nor a group")
    if sum(not (atom["bound"] or _letter(atom)) for atom in atoms) > MAX_REPEATS:
        raise ValueError(f"the pattern {whole!r} has more than {MAX_REPEATS} repetitions")
    return RegionOpening(literal, "".join(atom[0] for atom in atoms), until, last)


def _atoms(pattern: str, whole: str) -> list[re.Match[str]]:
    atoms, at = [], 0
    while at < len(pattern):
        atom = ATOM.match(pattern, at)
        if atom is None:
            raise ValueError(f"the pattern {whole!r} is not supported at {pattern[at:]!r}")
        atoms.append(atom)
        at = atom.end()
    return atoms


def _written(atom: re.Match[str], name: str) -> str | None:
    if atom["group"]:
        if not re.fullmatch(f"{atom['of']}+", name):
            raise ValueError(f"{name!r} does not match {atom['of']}")
        return name
    if atom["blank"]:
        return " " if atom["blank"][0] in " [" else "\n"
    return _letter(atom)


def _letter(atom: re.Match[str]) -> str | None:
    """Return the character that an atom stands for, or None if there may be several."""
    return CONTROL.get(atom["control"] or "") or atom["escaped"] or atom["plain"]
