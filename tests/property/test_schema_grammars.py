"""For any schema, the parser reads what the grammar admits as arguments that fit the schema."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine_core.grammar.markers import is_marker
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import NotWritable
from gateway.formats.registry import TOOLS, Format
from tests.support.json_schema import fits
from tests.support.tool_grammars import Endless, Model, Walk, calls_of

NAMES = (
    *("qwen3_coder", "mimo", "seed_oss", "minimax_m2", "dots", "minicpm5", "deepseek_v32", "step3"),
    *("glm47", "hy_v3", "k2_horizon", "minimax_m3", "pythonic", "olmo3", "gemma4", "kimi_k3"),
)
TEXTS = ("a", "null", "true", "12", "", " x ", "<b>", "[1]", "a\nb", 'q"', "None", "é")

strings = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.sampled_from(["^[a-c]{1,3}$", "[^b]", r"^(?:ab|\d)+[.]\w{0,3}$", "^[^a]?$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4, unique=True).map(
        lambda values: {"type": "string", "enum": values}
    ),
)
numbers = st.sampled_from(
    [
        {"type": "number"},
        {"type": "integer"},
        {"type": "integer", "minimum": 3, "maximum": 40},
        {"type": "number", "exclusiveMinimum": 0},
        {"enum": [1, 2.5, -3]},
    ]
)
scalars = st.one_of(
    strings,
    numbers,
    st.sampled_from(
        [
            {},
            {"type": "boolean"},
            {"type": "null"},
            {"const": True},
            {"enum": ["a", 1, None]},
            {"type": ["string", "null"]},
            {"type": ["integer", "string"]},
            {"type": ["string", "boolean", "null"], "maxLength": 3},
            {"type": "object"},
            {"type": "array"},
            {"type": "object", "additionalProperties": {"type": "integer"}},
            {"$ref": "#/$defs/tree"},
        ]
    ),
)
TREE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "sub": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["v"],
    "additionalProperties": False,
}


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "ab", "b_1", "kind", "語"])
    return st.builds(
        lambda properties, needed: {
            "type": "object",
            "properties": properties,
            "required": [name for n, name in enumerate(properties) if needed >> n & 1],
            "additionalProperties": False,
        },
        st.dictionaries(names, values, max_size=4),
        st.integers(0, 15),
    )


def arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda item, least, more: {
            "type": "array",
            "items": item,
            "minItems": least,
            "maxItems": least + more,
        },
        values,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def unions(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, min_size=2, max_size=3).map(lambda options: {"anyOf": options})


values = st.recursive(scalars, lambda v: st.one_of(objects(v), arrays(v), unions(v)), max_leaves=6)
parameters = objects(values).map(lambda schema: {**schema, "$defs": {"tree": TREE}})


@cache
def model(name: str, tokens: bool) -> Model:
    format = Format(TOOLS[name])
    return Model(format, tuple(filter(is_marker, format.markers())) if tokens else ())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=parameters, seed=st.integers(0, 999), tokens=st.booleans())
def test_every_admitted_text_fits_the_schema(
    name: str, schema: dict[str, Any], seed: int, tokens: bool
) -> None:
    spoken, tool = model(name, tokens), DeclaredTool("f", schema)
    try:
        said = Walk(spoken, random.Random(seed))(spoken.bound.required_calls([tool], many=False))
    except (
        NotWritable,
        Endless,
    ):  # a refused schema, or an endless walk
        assume(False)
    (call,) = calls_of(spoken.read(said, [tool]))
    text = spoken.tokenizer.decode(said, skip_special_tokens=False)
    assert fits(call.arguments, schema), (text, call.arguments)
