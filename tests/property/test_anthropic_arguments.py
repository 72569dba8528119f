"""Any text as arguments becomes the same JSON object, wherever the text is cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.anthropic.blocks import ToolInput
from gateway.formats.events import INVALID_JSON
from tests.support.formats import is_json_object

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=4)
NEARLY = st.text(alphabet='{}[]",:\\ux09dcD8-+.eEtrufalsn \n\x01', max_size=30)


def told(bits: list[str], *, complete: bool) -> str:
    arguments = ToolInput()
    return "".join(map(arguments.push, bits)) + arguments.finish(complete=complete)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(OBJECT, st.booleans(), st.lists(st.integers(0), max_size=8))
def test_every_object_arrives(value: dict[str, object], ascii: bool, places: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert told(cut(text, places), complete=True) == text


@given(OBJECT, st.integers(0), st.lists(st.integers(0), max_size=8), st.booleans())
def test_the_beginning_of_an_object_becomes_an_object(
    value: dict[str, object], end: int, places: list[int], complete: bool
) -> None:
    text = json.dumps(value)
    text = text[: end % len(text)]
    whole = json.loads(told(cut(text, places), complete=complete))
    assert (INVALID_JSON in whole) is (complete or INVALID_JSON in value)


@given(NEARLY | st.text(), st.lists(st.integers(0), max_size=8), st.booleans())
def test_any_text_becomes_an_object_whatever_the_cut(
    text: str, places: list[int], complete: bool
) -> None:
    whole = told([text], complete=complete)
    assert told(cut(text, places), complete=complete) == whole
    assert told(list(text), complete=complete) == whole
    value = json.loads(whole)
    if complete and not is_json_object(text) and INVALID_JSON in value:
        assert value[INVALID_JSON] == text
    if not complete:
        assert isinstance(value, dict)
    elif is_json_object(text) and INVALID_JSON not in value:
        assert value == json.loads(text)
