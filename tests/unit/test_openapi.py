"""The OpenAPI document has every route, and is made from the structs that check requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.app import create_app, encoded_document, operations
from gateway.http.field_docs import field_descriptions, split_docstring, structs_in
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
    assert body["properties"]["bad_words"]["description"].startswith("texts that the answer")
    assert "include_reasoning" not in body["description"]
    options = spec["components"]["schemas"]["StreamOptions"]
    assert options["description"] == "Options of a stream."
    assert options["properties"]["include_usage"]["description"].startswith("send a last chunk")
