"""The request's target, as it was sent, before anything is decoded.

Proxies, libraries and servers disagree about `//`, dot segments and encoded slashes, and where two
of them disagree, what one has checked is not what the other serves. So we serve one spelling only:
what is fixed in a route's rule has to be sent letter by letter; variables may be encoded.
"""

from __future__ import annotations

import re
from functools import cache
from urllib.parse import unquote

_VARIABLE = re.compile(r"<(?:(?P<kind>\w+):)?\w+>")
_PATTERNS = {None: r"[^/]+", "string": r"[^/]+", "path": r".+"}
_UNPRINTABLE = re.compile(r"[^!-~]")
MAX_TOLD_LETTERS = 200


def path_in(target: str) -> str:
    """Of `/path?query`, as sent."""
    return target.partition("?")[0]


def fault_in(path: str) -> str | None:
    """What is wrong with a path, whatever it leads to; None: nothing."""
    if not path.startswith("/"):
        return "the target has to begin with a slash"
    decoded = unquote(path, encoding="latin-1")
    if not path.isascii() or _has_control(decoded) or "\\" in decoded:
        return "the path has bytes that no path has"
    if "//" in path:
        return "the path has an empty segment"
    if not {".", ".."}.isdisjoint(decoded.split("/")):
        return "the path has dot segments"
    return None


def _has_control(text: str) -> bool:
    return any(letter < " " or letter == "\x7f" for letter in text)


def spells(path: str, rule: str) -> bool:
    """Whether a path, as sent, is the spelling of a route's rule ("/v1/models/<path:name>")."""
    return _pattern(rule).fullmatch(path) is not None


@cache
def _pattern(rule: str) -> re.Pattern[str]:
    """Rules are few, and fixed when the server starts."""
    parts, end = [], 0
    for variable in _VARIABLE.finditer(rule):
        parts += [re.escape(rule[end : variable.start()]), _PATTERNS[variable["kind"]]]
        end = variable.end()
    return re.compile("".join([*parts, re.escape(rule[end:])]))


def printable(path: str) -> str:
    """For a log: one line, whatever was sent."""
    shown = _UNPRINTABLE.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", path[:MAX_TOLD_LETTERS])
    return shown + ("..." if len(path) > MAX_TOLD_LETTERS else "")
