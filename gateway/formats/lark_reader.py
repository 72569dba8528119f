"""Reads a grammar in Lark.

The dialect is Lark's, without templates, imports other than those from `common`, `%declare`,
`%extend` and `%override`, and without look-around, anchors and back-references in regular
expressions: <https://lark-parser.readthedocs.io/en/stable/grammar.html>. `item{2,3}` is
llguidance's form of `item~2..3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gateway.formats.lark_terminals import (
    COMMON,
    NotConvertible,
    PlainSpelling,
    has_char,
    terminal_pattern,
)
from gateway.formats.string_limits import Ranges, char_ranges, merged

MAX_REPEATS = 1000
"""Largest number in `item~n` and `item{n}`."""
MAX_DEPTH = 50
"""Most parentheses inside one another."""

_TOKEN = re.compile(
    r"""
      (?P<blank>   [ \t\f\r\n]+ | //[^\n]* | \#[^\n]* )
    | (?P<string>  "(?:[^"\\\n]|\\.)*"i? )
    | (?P<regexp>  /(?!/)(?:[^/\\\n]|\\.)+/[imslux]* )
    | (?P<name>    [?!]*[A-Za-z_][A-Za-z_0-9]* )
    | (?P<number>  [0-9]+ )
    | (?P<range>   \.\. )
    | (?P<arrow>   -> )
    | (?P<keyword> %[a-z]+ )
    | (?P<sign>    [-:|()\[\]{}*+?~.,] )
    """,
    re.VERBOSE,
)
# ---- the parts of a grammar


class LarkName(NamedTuple):
    """A rule or a terminal."""

    name: str


class LarkText(NamedTuple):
    """A regular expression."""

    pattern: str


class LarkRow(NamedTuple):
    items: Sequence[LarkPart]


class LarkOptions(NamedTuple):
    options: Sequence[LarkPart]


class LarkTimes(NamedTuple):
    """`item`, from `least` to `most` times. None: without a limit."""

    item: LarkPart
    least: int
    most: int | None


LarkPart = LarkName | LarkText | LarkRow | LarkOptions | LarkTimes


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


class LarkReader:
    """Reads the definitions of a grammar in Lark."""

    def __init__(self, source: str) -> None:
        #: Name of a rule or terminal -> its definition.
        self.definitions: dict[str, LarkPart] = {}
        #: What may stand between any two terminals of a rule.
        self.ignored: list[LarkPart] = []
        self._tokens = list(_tokens(source))
        self._at = 0
        while self._at < len(self._tokens):
            self._statement()

    # ---- tokens

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def _kind(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at].kind if at < len(self._tokens) else ""

    def _take(self) -> _Token:
        if self._at >= len(self._tokens):
            raise NotConvertible("the grammar ends in the middle of a definition")
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, text: str) -> bool:
        found = self._kind() == "sign" and self._peek() == text
        self._at += found
        return found

    def _expect(self, text: str) -> None:
        token = self._take()
        if token.text != text:
            raise _fault(token, f"expected {text!r}; got {token.text!r}")

    def _starts_definition(self) -> bool:
        if self._kind() != "name":
            return False
        after = 1
        if self._peek(1) == ".":  # a priority
            after = 4 if self._peek(2) in ("-", "+") else 3
        return self._peek(after) == ":"

    # ---- statements

    def _statement(self) -> None:
        if self._kind() == "keyword":
            self._keyword(self._take())
            return
        token = self._take()
        if token.kind != "name":
            raise _fault(token, f"expected the name of a rule or a terminal; got {token.text!r}")
        if self._peek() == "{":
            raise _fault(token, "templates are not supported")
        if self._accept("."):
            if self._peek() in ("-", "+"):
                self._at += 1
            self._take()
        self._expect(":")
        name = token.text.lstrip("?!")
        if name in self.definitions:
            raise _fault(token, f"{name!r} is defined twice")
        self.definitions[name] = self._options(0)

    def _keyword(self, token: _Token) -> None:
        match token.text:
            case "%ignore":
                self.ignored.append(self._options(0))
            case "%import":
                self._import(token)
            case _:
                raise _fault(token, f"{token.text} is not supported")

    def _import(self, token: _Token) -> None:
        if self._take().text != "common":
            raise _fault(token, "only terminals of `common` can be imported")
        if self._accept("."):
            name = self._take().text
            alias = name
            if self._kind() == "arrow":
                self._at += 1
                alias = self._take().text
            self._common(token, name, alias)
            return
        self._expect("(")
        while not self._accept(")"):
            name = self._take().text
            self._common(token, name, name)
            self._accept(",")

    def _common(self, token: _Token, name: str, alias: str) -> None:
        if name not in COMMON:
            raise _fault(token, f"`common` has no terminal {name!r} that is supported")
        self.definitions[alias] = LarkText(COMMON[name])

    # ---- expressions

    def _options(self, depth: int) -> LarkPart:
        if depth > MAX_DEPTH:
            raise NotConvertible("has too many parentheses inside one another")
        options = [self._row(depth)]
        while self._accept("|"):
            options.append(self._row(depth))
        return options[0] if len(options) == 1 else LarkOptions(options)

    def _row(self, depth: int) -> LarkPart:
        items: list[LarkPart] = []
        while self._begins_item():
            items.append(self._repeated(self._item(depth)))
        if self._kind() == "arrow":  # the name of this alternative
            self._at += 1
            self._take()
        return items[0] if len(items) == 1 else LarkRow(items)

    def _begins_item(self) -> bool:
        if self._kind() == "sign":
            return self._peek() in "(["
        return self._kind() in ("string", "regexp", "name") and not self._starts_definition()

    def _item(self, depth: int) -> LarkPart:
        if self._accept("("):
            inner = self._options(depth + 1)
            self._expect(")")
            return inner
        if self._accept("["):
            inner = self._options(depth + 1)
            self._expect("]")
            return LarkTimes(inner, 0, 1)
        token = self._take()
        if token.kind == "name":
            if self._peek() == "{" and self._kind(1) != "number":
                raise _fault(token, "templates are not supported")
            return LarkName(token.text)
        if token.kind == "string" and self._kind() == "range":
            self._at += 1
            return LarkText(PlainSpelling().one_of(_span(token, self._take())))
        return LarkText(_pattern_of(token))

    def _repeated(self, item: LarkPart) -> LarkPart:
        if self._kind() != "sign":
            return item
        match self._peek():
            case "*":
                least, most = 0, None
            case "+":
                least, most = 1, None
            case "?":
                least, most = 0, 1
            case "~" | "{":
                return self._counted(item)
            case _:
                return item
        self._at += 1
        return LarkTimes(item, least, most)

    def _counted(self, item: LarkPart) -> LarkPart:
        token = self._take()
        least = self._number()
        most: int | None = least
        if token.text == "{":
            if self._accept(","):
                most = None if self._peek() == "}" else self._number()
            self._expect("}")
        elif self._kind() == "range":
            self._at += 1
            most = self._number()
        if most is not None and most < max(least, 1):
            raise _fault(token, "has a repetition whose limits are in the wrong order")
        return LarkTimes(item, least, most)

    def _number(self) -> int:
        token = self._take()
        if token.kind != "number" or len(token.text) > 6 or int(token.text) > MAX_REPEATS:
            raise _fault(token, f"expected a number of repetitions up to {MAX_REPEATS:,}")
        return int(token.text)


def _tokens(source: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise NotConvertible(f"line {line}: cannot read {source[at : at + 20]!r}")
        kind, text = str(found.lastgroup), found[0]
        if kind != "blank":
            yield _Token(kind, text, line)
        line += text.count("\n")
        at = found.end()


def _fault(token: _Token, what: str) -> NotConvertible:
    return NotConvertible(f"line {token.line}: {what}")


_SIGNS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "0": "\0", "a": "\a"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def _string(token: _Token) -> str:
    """Return the text of a string in quotes."""

    def sign(found: re.Match[str]) -> str:
        number = found[1] or found[2] or found[3]
        if number is None:
            return _SIGNS.get(found[4], found[4])
        if not has_char(int(number, 16)):
            raise _fault(token, f"there is no character {found[0]}")
        return chr(int(number, 16))

    return _ESCAPE.sub(sign, token.text.removesuffix("i")[1:-1])


def _span(first: _Token, last: _Token) -> Ranges:
    texts = (_string(first), _string(last) if last.kind == "string" else "")
    if any(len(text) != 1 for text in texts) or texts[0] > texts[1]:
        raise _fault(first, "a range needs two characters in order")
    return ((ord(texts[0]), ord(texts[1])),)


def _other_cases(code: int) -> Ranges:
    """Return the small and the capital letter of a character, if each is one character that has
    this one as its other case, too."""
    sign = chr(code)
    cases = [case for case in (sign.lower(), sign.upper()) if len(case) == 1]
    return [(ord(c), ord(c)) for c in cases if sign in (c.lower(), c.upper())]


def _pattern_of(token: _Token) -> str:
    """Return the regular expression of a string or of a regular expression in the source."""
    if token.kind == "string":
        signs = [char_ranges(sign) for sign in _string(token)]
        if token.text.endswith("i"):
            signs = [merged([*each, *_other_cases(each[0][0])]) for each in signs]
        return "".join(map(PlainSpelling().one_of, signs))
    body, _, flags = token.text[1:].rpartition("/")
    return terminal_pattern(body.replace("\\/", "/"), flags, f"line {token.line}: ")
