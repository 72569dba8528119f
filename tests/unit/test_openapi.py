"""The OpenAPI document has every route, and is made from the structs that check requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar, get_type_hints

import msgspec
import pytest

from gateway.app import create_app, encoded_document, operations
from gateway.http.field_docs import (
    as_sentence,
    documented,
    field_descriptions,
    split_docstring,
    structs_in,
)
from gateway.http.openapi import document, path_of

UNDOCUMENTED_METHODS = {"HEAD", "OPTIONS"}


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    return json.loads(encoded_document())


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_document_has_every_route(spec):
    routes = {
        (path_of(rule.rule), method.lower())
        for rule in create_app().url_map.iter_rules()
        for method in (rule.methods or set()) - UNDOCUMENTED_METHODS
    }
    documented = {(path, method) for path, item in spec["paths"].items() for method in item}
    assert documented == routes


def test_every_reference_has_a_component(spec):
    names = {f"#/components/schemas/{name}" for name in spec["components"]["schemas"]}
    assert references(spec) <= names


def test_operation_ids_are_unique_and_component_names_are_identifiers(spec):
    rows = [item for path in spec["paths"].values() for item in path.values()]
    ids = [row["operationId"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert all(name.isidentifier() for name in spec["components"]["schemas"])


def test_an_error_about_models_has_the_shape_of_either_api(spec):
    for path in ("/v1/models", "/v1/models/{name}"):
        answer = spec["paths"][path]["get"]["responses"]["404"]
        kinds = answer["content"]["application/json"]["schema"]["anyOf"]
        names = {kind["$ref"].rpartition("/")[2] for kind in kinds}
        assert names == {"ErrorAnswer", "MessagesErrorAnswer"}


def test_the_document_has_the_bounds_of_the_request_fields(spec):
    fields = spec["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert fields["messages"]["minItems"] == 1


def test_the_parameters_of_a_path_are_described(spec):
    for path, item in spec["paths"].items():
        for operation in item.values():
            places = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"]
            assert sorted(places) == sorted(part[1:-1] for part in path.split("/") if "{" in part)


def test_the_document_does_not_depend_on_the_order_of_the_rows():
    rows = operations()
    assert document(reversed(rows), "1") == document(rows, "1")


class Inherited(msgspec.Struct):
    """A base.

    seed        -1 means no seed
    first, second
                describes both,
                in two lines
    """

    seed: int
    first: int
    second: int


class Described(Inherited):
    """A struct whose fields are described.

    seed  overrides the description
    own   has a description. It
          goes on

    Not a field   but prose.
    """

    own: list[Inherited]


def test_a_struct_inherits_the_descriptions_of_its_fields() -> None:
    both = "describes both, in two lines"
    assert field_descriptions(Described) == {
        "seed": "overrides the description",
        "first": both,
        "second": both,
        "own": "has a description. It goes on",
    }
    prose, _ = split_docstring(Described)
    assert prose == "A struct whose fields are described.\n\n\nNot a field   but prose."
    assert list(structs_in([list[Described]])) == [Described, Inherited]


def test_the_document_describes_fields_where_they_are(spec):
    body = spec["components"]["schemas"]["ChatBody"]
    assert body["properties"]["bad_words"]["description"].startswith("Texts that the answer")
    assert "include_reasoning" not in body["description"]
    options = spec["components"]["schemas"]["StreamOptions"]
    assert options["description"] == "Options of a stream."
    assert options["properties"]["include_usage"]["description"].startswith("Whether a last chunk")


def bodies() -> list[type[msgspec.Struct]]:
    """Return the structs of all request bodies, and those inside them that only requests have."""
    whole = [body for operation in operations() for body in operation.takes]
    return [
        kind for kind in structs_in(whole) if kind in whole or kind.__module__.endswith(".requests")
    ]


def test_every_field_of_a_request_has_a_sentence(spec):
    for kind in bodies():
        schema = spec["components"]["schemas"][kind.__name__]
        for name, field in schema["properties"].items():
            text = field.get("description", "")
            assert re.search(r"\w.{6,}\.$", text), f"{kind.__name__}.{name}: {text!r}"
        assert not schema["description"].startswith("The body of"), kind.__name__


def members(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each member of the objects in a schema, at any depth, with its path. References to
    structs are not followed."""
    if isinstance(schema, list):
        for each in schema:
            yield from members(each, path)
    elif isinstance(schema, dict):
        for name, inner in schema.get("properties", {}).items():
            yield f"{path}.{name}", inner
            yield from members(inner, f"{path}.{name}")
        for key in ("items", "anyOf", "oneOf", "allOf"):
            yield from members(schema.get(key), f"{path}[]" if key == "items" else path)


def test_every_nested_member_of_a_request_has_a_sentence(spec):
    """Types that say only which of several forms an object has need none."""
    found = 0
    for kind in bodies():
        schema = spec["components"]["schemas"][kind.__name__]
        for path, member in members(schema, kind.__name__):
            text = member.get("description", "")
            assert "const" in member or re.search(r"\w.{6,}\.$", text), f"{path}: {text!r}"
            found += 1
    assert found > 500


def test_the_examples_of_fields_are_accepted(spec):
    num_examples = 0
    for kind in bodies():
        hints = get_type_hints(kind, include_extras=True)
        schema = spec["components"]["schemas"][kind.__name__]
        names = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        for encoded, field in schema["properties"].items():
            for example in field.get("examples", ()):
                msgspec.json.decode(json.dumps(example), type=hints[names[encoded]])
                num_examples += 1
    assert num_examples > 50


def test_the_fields_that_most_requests_use_come_first(spec):
    names = list(spec["components"]["schemas"]["ChatBody"]["properties"])
    usual = ["model", "messages", "max_tokens", "max_completion_tokens", "stream", "temperature"]
    assert names[: len(usual)] == usual
    assert {"functions", "function_call", "audio"} <= set(names[-8:]), "unsupported ones are last"
    names = list(spec["components"]["schemas"]["RerankBody"]["properties"])
    assert names[:3] == ["model", "query", "documents"]


class Repeated(msgspec.Struct):
    """A struct with fields of another one.

    first  differs
    """

    described_like: ClassVar = Inherited

    second: int
    first: int


def test_a_struct_takes_descriptions_of_the_struct_that_it_is_like() -> None:
    assert field_descriptions(Repeated) == {
        "second": "describes both, in two lines",
        "first": "differs",
    }


@pytest.mark.parametrize(
    ("description", "sentence"),
    [
        ("most tokens. Default: 1", "Most tokens. Default: 1."),
        ("-1 means no seed", "-1 means no seed."),
        ("base64: a text", "base64: a text."),
        ('"text" adds the text', '"text" adds the text.'),
    ],
)
def test_a_description_becomes_a_sentence(description: str, sentence: str) -> None:
    assert as_sentence(description) == sentence


def test_an_example_is_a_member_of_its_own() -> None:
    assert documented('what ends it. Example: ["\\n"]') == {
        "description": "What ends it.",
        "examples": [["\n"]],
    }
    with pytest.raises(ValueError, match="Expecting value"):
        documented("what ends it. Example: a full stop")
