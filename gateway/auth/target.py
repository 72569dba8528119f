"""Checks of the request target as it was sent, before it is decoded.

Proxies, libraries and servers disagree about `//`, dot segments and encoded slashes. If two of them
disagree, the path that one checks is not the path that the other serves. So exactly one spelling is
served: the fixed parts of a route's rule must be sent letter by letter; variables may be encoded.
"""

from __future__ import annotations

import re
from functools import cache
from urllib.parse import unquote

_VARIABLE = re.compile(r"<(?:(?P<kind>\w+):)?\w+>")
_PATTERNS = {None: r"[^/]+", "string": r"[^/]+", "path": r".+"}
_UNPRINTABLE = re.compile(r"[^!-~]")
MAX_SHOWN_CHARS = 200


def path_in(target: str) -> str:
    """Return the path of `/path?query`, as sent."""
    return target.partition("?")[0]


def fault_in(path: str) -> str | None:
    """Return why a path is malformed; None if it is not."""
    if not path.startswith("/"):
        return "the request target must begin with a slash"
    decoded = unquote(path, encoding="latin-1")
    if not path.isascii() or _has_control(decoded) or "\\" in decoded:
        return "the path contains characters that are not allowed"
    if "//" in path:
        return "the path contains an empty segment"
    if not {".", ".."}.isdisjoint(decoded.split("/")):
        return "the path contains dot segments"
    return None


def _has_control(text: str) -> bool:
    return any(letter < " " or letter == "\x7f" for letter in text)


def spells(path: str, rule: str) -> bool:
    """Return whether a path, as sent, matches a route's rule such as "/v1/models/<path:name>"."""
    return _pattern(rule).fullmatch(path) is not None


@cache
def _pattern(rule: str) -> re.Pattern[str]:
    """Return the pattern of a rule. The cache is bounded by the number of routes."""
    parts, end = [], 0
    for variable in _VARIABLE.finditer(rule):
        parts += [re.escape(rule[end : variable.start()]), _PATTERNS[variable["kind"]]]
        end = variable.end()
    return re.compile("".join([*parts, re.escape(rule[end:])]))


def printable(path: str) -> str:
    """Return the path for a log or an error: one line of bounded length."""
    shown = _UNPRINTABLE.sub(lambda found: f"%{ord(found[0]) & 0xFF:02X}", path[:MAX_SHOWN_CHARS])
    return shown + ("..." if len(path) > MAX_SHOWN_CHARS else "")
