"""Every wrong value in a field that a view checks itself is refused with the field's path.

The structs of bodies accept any value in such fields: messages, tools, content blocks. The schemas
of the OpenAPI document say what is wrong there. tests/unit/test_wrong_values.py has the other
fields. Routes of one API share the checks, so each body is sent to a route that generates nothing.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.app import encoded_document, operations
from gateway.http.body import convert
from gateway.http.route import Operation
from protocol.wire.errors import InvalidRequest
from tests.support.gateway_process import GatewayProcess
from tests.support.waiting import HANG_S
from tests.support.wrong_values import WrongValues, fault_in

DOCUMENT = json.loads(encoded_document())
ROUTES = {
    "/v1/chat/completions/input_tokens": {
        "messages[0].content": "a list may be empty, and its items texts",
        "messages[0].tool_calls[0].function.arguments": "an object, as in Ollama's API",
        "messages[0].tool_calls[0].type": "only custom is another type than function",
    },
    "/v1/messages/count_tokens": {
        "messages[0].content[0].data": "not read",
        "messages[0].content[0].signature": "signatures of other servers are not read",
        "thinking": "true, as in other APIs",
        "thinking.budget_tokens": "-1: no limit",
        "tool_choice.name": "not read without the type tool",
        "tools[0].type": "tools of Anthropic's servers are left out with a warning",
    },
    "/v1/responses/input_tokens": {
        "input[0].output": "a list may be empty",
        "input[0].type": "an empty value is none",
    },
}
"""Path of a route -> fields in which wrong values are accepted, and why."""


@pytest.fixture
def connection(gateway: GatewayProcess) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=HANG_S)
    yield connection
    connection.close()


@pytest.mark.parametrize("path", ROUTES)
def test_each_wrong_value_is_refused_with_its_path(
    path: str, connection: http.client.HTTPConnection
) -> None:
    operation = next(each for each in operations() if each.rule == path and each.takes)
    entry = DOCUMENT["paths"][path][operation.method]
    schema = entry["requestBody"]["content"]["application/json"]["schema"]
    wrong = WrongValues(schema, DOCUMENT["components"]["schemas"])
    num_refused, faults = 0, {}
    for place in wrong.places():
        whole = answer(connection, path, place.body)
        for value in wrong.of(place):
            body = place.with_value(value)
            if is_refused(body, operation):
                continue
            status, message = answer(connection, path, body)
            if (status, message) == whole:
                continue  # something else in the example is refused first
            if status == 200:
                is_fine = value is None or place.path in ROUTES[path]
            else:
                is_fine = 400 <= status < 500 and not fault_in(message, place.path)
                num_refused += 1
            if not is_fine:
                faults[place.path, repr(value)] = (status, message)
    assert faults == {}
    assert num_refused > 100


def is_refused(body: Any, operation: Operation) -> bool:
    """Return whether the structs of an operation refuse a body already."""
    for kind in operation.takes:
        try:
            convert(body, kind)
        except InvalidRequest:
            continue
        return False
    return True


def answer(connection: http.client.HTTPConnection, path: str, body: Any) -> tuple[int, str]:
    """Return the status and the message of a response; "" if it has none."""
    head = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), head)
    response = connection.getresponse()
    data = response.read()
    if response.status == 200:
        return 200, ""
    return response.status, json.loads(data)["error"]["message"]
