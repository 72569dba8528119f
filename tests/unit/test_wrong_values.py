"""Every wrong value in every typed field of every body is refused with the field's path.

The fields are those of the OpenAPI document, and a value is wrong if its schema does not allow it.
tests/integration/test_wrong_values.py has the fields that views check step by step.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.app import encoded_document, operations
from gateway.http.body import convert
from gateway.http.openapi import path_of
from gateway.http.route import Operation
from protocol.wire.errors import InvalidRequest
from tests.support.wrong_values import WrongValues, fault_in

DOCUMENT = json.loads(encoded_document())
WITH_BODIES = [
    operation
    for operation in operations()
    if operation.takes and operation.takes_type == "application/json"
]


def refusal(body: Any, path: str, operation: Operation) -> str:
    """Return the message with which a body is refused; "" if it is not. If there are several
    structs, the rest of the body decides in which of them the field at `path` is."""
    messages = []
    for kind in operation.takes:
        try:
            convert(body, kind)
        except InvalidRequest as error:
            messages.append(error.message)
        else:
            return ""
    return min(messages, key=lambda message: bool(fault_in(message, path)))


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda each: f"{each.method} {each.rule}")
def test_each_wrong_value_is_refused_with_its_path(operation: Operation) -> None:
    entry = DOCUMENT["paths"][path_of(operation.rule)][operation.method]
    schema = entry["requestBody"]["content"]["application/json"]["schema"]
    wrong = WrongValues(schema, DOCUMENT["components"]["schemas"])
    refusals = {
        (place.path, repr(value)): refusal(place.with_value(value), place.path, operation)
        for place in wrong.places()
        for value in wrong.of(place)
    }
    refused = {place: message for place, message in refusals.items() if message}
    assert refused
    assert {
        place: message for place, message in refused.items() if fault_in(message, place[0])
    } == {}
