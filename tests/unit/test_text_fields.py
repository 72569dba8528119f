"""Every text field of every API's bodies has a largest length, or counts as a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from msgspec import inspect

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.openai.requests import ChatBody
from gateway.api.responses.requests import ResponsesBody
from gateway.app import operations
from gateway.http.body import convert, decode
from gateway.http.text_fields import COUNTS_AS_PROMPT, Label
from protocol.wire.errors import InvalidRequest
from tests.support.processes import ROOT

CLIENTS = ROOT.parent / "shared" / "clients"
"""Requests that client programs have sent."""
BODIES = {kind for operation in operations() for kind in operation.takes}
BOUNDED_ELSEWHERE = (
    "protocol.engine.grammar",  # `check_grammar` bounds the sum of all texts
    "gateway.api.tokens.responses",  # derendering answers at once, and keeps nothing
)
"""Modules of structs whose texts have other bounds."""


def unbounded(kind: inspect.Type, path: str, seen: frozenset[type] = frozenset()) -> Iterator[str]:
    """Yield the paths of the texts inside a type that have no bound and no mark."""
    match kind:
        case inspect.Metadata(type=inner, extra=extra, extra_json_schema=schema):
            is_marked = COUNTS_AS_PROMPT in (extra or {})
            is_file = (schema or {}).get("format") == "binary"  # --file-max-mib bounds it
            if not (is_marked or is_file):
                yield from unbounded(inner, path, seen)
        case inspect.StrType(max_length=None, pattern=None):
            yield path
        case inspect.UnionType(types=types):
            for inner in types:
                yield from unbounded(inner, path, seen)
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner):
            yield from unbounded(inner, f"{path}[]", seen)
        case inspect.DictType(key_type=key, value_type=value) if value != inspect.AnyType():
            yield from unbounded(key, f"{path}.key", seen)
            yield from unbounded(value, f"{path}.value", seen)
        case inspect.StructType(cls=cls, fields=fields):
            if cls not in seen and cls.__module__ not in BOUNDED_ELSEWHERE:
                for field in fields:
                    yield from unbounded(field.type, f"{path}.{field.encode_name}", seen | {cls})


@pytest.mark.parametrize("body", sorted(BODIES, key=str), ids=lambda body: body.__name__)
def test_a_text_field_has_a_bound_or_counts_as_prompt(body: type) -> None:
    assert list(unbounded(inspect.type_info(body), body.__name__)) == []


def test_a_text_without_a_bound_is_found() -> None:
    found = unbounded(inspect.type_info(dict[str, list[str | int]]), "x")
    assert list(found) == ["x.key", "x.value[]"]
    assert list(unbounded(inspect.type_info(list[Label]), "x")) == []


@pytest.mark.parametrize(
    "field", ["user", "safety_identifier", "prompt_cache_key", "service_tier", "model"]
)
def test_a_field_of_a_response_that_is_too_long_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(b'{"input": "hi", "%b": "%b"}' % (field.encode(), b"x" * 2000), ResponsesBody)
    assert caught.value.param == field


@pytest.mark.skipif(not CLIENTS.is_dir(), reason=f"{CLIENTS} is absent")
def test_bodies_of_real_clients_that_were_accepted_still_are() -> None:
    bodies = {operation.rule: operation.takes for operation in operations()}
    records = [json.loads(file.read_bytes()) for file in sorted(CLIENTS.glob("*.json"))]
    accepted = [record for record in records if record["status_from_tidegate"] == 200]
    assert accepted
    for record in accepted:
        (kind,) = bodies[record["path"].partition("?")[0]]
        convert(record["body"], kind)


def test_identifiers_of_real_clients_are_accepted() -> None:
    user = b"user_%b_account__session_%b" % (b"0" * 64, b"0" * 36)
    for kind, fields in (
        (ChatBody, b'"messages": [{}], "user": "%b"'),
        (ResponsesBody, b'"input": "", "safety_identifier": "%b"'),
        (MessagesBody, b'"messages": [{}], "max_tokens": 1, "metadata": {"user_id": "%b"}'),
    ):
        assert decode(b"{" + fields % user + b"}", kind)
