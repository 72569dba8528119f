"""A grammar in Lark becomes a regular expression of the same texts.

Python's own Lark is the reference. The texts that it parses and those that it does not are compared
for grammars with all parts of the language.
"""

from __future__ import annotations

import re

import lark
import pytest

from gateway.formats.lark_pattern import MAX_CHARS, lark_pattern, regex_pattern
from gateway.formats.lark_terminals import COMMON, NotConvertible
from tests.support.custom_tools import ARITHMETIC, JSON, PATCH

PATCHES = (
    "*** Begin Patch\n*** Add File: a\n+\n+x<y\n*** End Patch",
    "*** Begin Patch\n*** Delete File: a b\n*** Update File: c\n@@ f\n-x\n+y\n z\n*** End Patch\n",
    "*** Begin Patch\n*** Update File: c\n*** Move to: d\n*** End Patch",
)


@pytest.mark.parametrize(
    ("source", "parsed", "refused"),
    [
        (PATCH, PATCHES, ("", PATCHES[0][:-1], PATCHES[0].replace("+x", "x"))),
        (ARITHMETIC, ("1", "1+2*(3 - 4)", "-(-5 )/6"), ("1+", "1234567", "(1", "2 3x")),
        (JSON, ("[]", "[1, 2.5e3]", '{"a": [TRUE]}', '"x\\\\y"'), ("[1 2]", '{"a"}', "True1")),
        ("start: /a/ | /b/~2 | /c/~2..3", ("a", "bb", "cc", "ccc"), ("b", "c", "cccc", "ab")),
        ('start: "a".."c" "\\u00e4"+ "\\x41"', ("bäA", "cääA"), ("däA", "bA")),
        ('start: ("x" | "yz"i)? [_T]\n_T: "!" | "?" // an end', ("", "x!", "Yz?", "!"), ("X", "y")),
        ('!start: a -> one\n  | b -> two\na: "1"\nb.2: "2"\n', ("1", "2"), ("3", "")),
        ("start: A\nA.-1: /[^\\d]/ | /\\w{2}/i", ("x", "ab", "_1"), ("7", "abc")),
        ('start: "a" "b"\n%ignore /[ ,]/\n%ignore "#"', ("ab", "a b", " a,b#"), ("ba", "a;b")),
        ("start: /./s /[\\].-]/ /\\//", ("\n]/", "a-/"), ("\n\n/", "a]")),
        ('start: a*\na: "(" b ")"\nb: a | "x"', ("", "((x))", "(x)(((x)))"), ("(", "x", "()")),
    ],
)
def test_the_same_texts_are_admitted(
    source: str, parsed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    pattern = re.compile(lark_pattern(source))
    reference = lark.Lark(source.replace("/(.*)/", "/(.+)/?"))  # Lark refuses empty terminals
    for text in parsed:
        reference.parse(text)
        assert pattern.fullmatch(text), text
    for text in refused:
        with pytest.raises(lark.exceptions.LarkError):
            reference.parse(text)
        assert not pattern.fullmatch(text), text


TEXTS = (
    *("", "0", "12", "-3", "+4", "1.", ".5", "1.25", "1e9", "2E-3", "a", "Z", "aB", "a_1", "_"),
    *(" ", "  ", "\t", "\n", "\r\n", "\r", "\f", '"a"', r'"a\"b"', '"a\nb"', "# x", "// x", "-- x"),
    *("/**/", "/* a * / */", "/* a */ b */", "/*", "1_000", "é", "f", "FF", "0x1"),
)


@pytest.mark.parametrize("name", COMMON)
def test_terminals_of_common_admit_the_same_texts(name: str) -> None:
    source = f"start: {name}\n%import common.{name}"
    pattern, reference = re.compile(lark_pattern(source)), lark.Lark(source)
    for text in TEXTS:
        try:
            reference.parse(text)
            parses = True
        except lark.exceptions.LarkError:
            parses = False
        assert bool(pattern.fullmatch(text)) == parses, text


def test_a_rule_nests_as_deeply_as_there_is_room() -> None:
    pattern = lark_pattern('start: "(" start ")" | "x"')
    depth = 11
    assert re.fullmatch(pattern, "(" * depth + "x" + ")" * depth)
    assert not re.fullmatch(pattern, "(" * 100 + "x" + ")" * 100), "fewer texts, never others"
    assert len(lark_pattern(JSON)) <= MAX_CHARS


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "no rule 'start'"),
        ("begin: /a/", "no rule 'start'"),
        ("start: a", "'a' is not defined"),
        ("start: /a/\nstart: /b/", "line 2: 'start' is defined twice"),
        ("start: start", "admits no text"),
        ('start: "a', "line 1: cannot read"),
        ("start: /a(/", "unmatched parenthesis"),
        ("start: /(?<=a)b/", "lookaround"),
        ("start: /a$/", "anchor"),
        ("start: /a/x", "flag 'x'"),
        ("start: (/a/", "ends in the middle"),
        ("start: /a/~3..2", "wrong order"),
        ("start: /a/~99999", "number of repetitions"),
        ('start: "b".."a"', "in order"),
        ("start: x{y}\nx{z}: z", "templates"),
        ("start: WORD\n%import python.WORD", "`common`"),
        ("start: A\n%declare A", "%declare"),
        ("start: A\n%import common.NOTHING", "'NOTHING'"),
        ("start: " + "(" * 99 + "/a/" + ")" * 99, "parentheses"),
        ("start: /a{1000}/~1000 /b/" + " /abcdefgh/" * 2000, "12,288 characters"),
        ("start: %", "cannot read"),
        ("start: a b\na: b b\nb: c c c c\nc: d d d d\nd: e e e e\ne: /[a-z]{9}x/ /y/ " * 1
         + "f f f f\nf: /abcdefghijklmnop/~2 /q/", "12,288 characters"),
        ('start: "' + "a" * 20_000 + '"', "12,288 characters"),
        ("start: " + "a " * 5000 + "\na: /[" + "bc" * 6000 + "]/", "12,288 characters"),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(600)) + "a600: /x/",
         "nested too deeply"),
        ('start: "\\ud800"', "no character"),
        ("start: /\\ud800/", "surrogate"),
        ("start: /x{,3}/", "misplaced '{'"),
        ("start: /a{2}{3}/", "misplaced '{'"),
        ("start: /\\07/", "octal"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(source: str, words: str) -> None:
    with pytest.raises(NotConvertible, match=re.escape(words)):
        lark_pattern(source)


@pytest.mark.parametrize("sign", "aß\u017fİ\u03c3\u03c2kK")
def test_a_string_without_case_admits_a_letter_and_its_other_case_only(sign: str) -> None:
    pattern = re.compile(lark_pattern(f'start: "{sign}"i'))
    assert pattern.fullmatch(sign)
    admitted = {case for case in map(chr, range(0x3000)) if pattern.fullmatch(case)}
    assert admitted <= {sign, sign.lower(), sign.upper()}
    assert all(sign in (case.lower(), case.upper()) for case in admitted)


def test_a_regular_expression_is_that_of_python() -> None:
    for source, text, other in (
        ("^[a-c]+$", "abc", "abcd"),
        (r"\w+\s\d", "ab_ 7", "é 7"),
        ("(?:a|b){2,}", "abab", "a"),
        (r"[^\s]", "x", " "),
        ("[]a]", "]", "b"),
        (r"a\$", "a$", "a"),
        (r"a\\$", "a\\", "a$"),
        (r"a\{,3}", "a{,3}", "aaa"),
    ):
        assert re.fullmatch(regex_pattern(source), text)
        assert not re.fullmatch(regex_pattern(source), other)
    for source in ("(?i:a)", r"(a)\1", r"a\b", "a(?!b)", "[a", "(a"):
        with pytest.raises(NotConvertible):
            regex_pattern(source)
