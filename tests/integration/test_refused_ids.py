"""Wrong ids in paths and wrong headers are refused like fields: which one, what is allowed, and
what came.

The ids are those of all routes in the OpenAPI document. Refused keys, hosts, origins and types of
bodies have tests of their own.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import requests

from gateway.app import operations
from gateway.http.route import Operation
from protocol.wire.field_words import MAX_SHOWN_CHARS
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, text_reply
from tests.support.waiting import HANG_S

GATEWAY = {"response_store": "responses", "file_store": "files"}
NAMED_IDS = {
    "response_id": 'response_id: must be the id of a stored response; got the text "no such id"',
    "stream_id": "stream_id: must be the id of a stored stream, which has not expired; got the "
    'text "no such id"',
    "batch_id": 'batch_id: must be the id of a stored batch; got the text "no such id"',
    "file_id": 'file_id: must be the id of a stored file; got the text "no such id"',
    "request_id": "request_id: no request with the id 'no such id' is open or has ended recently;",
    "/v1/models/<path:name>": "the model 'no such id' does not exist; this server serves scripted",
}
"""Variable of a path, or a rule -> the beginning of the refusal of "no such id"."""
FILES = {"/docs/<path:name>", "/web/<path:name>"}
"""Rules of pages: their 404 lists routes with similar paths."""
WITH_IDS = [each for each in operations() if "<" in each.rule and each.rule not in FILES]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
REFUSED = [
    ({"X-Resume": "yes"}, 'X-Resume: must be one of "1", "true", "0", "false"; got the text "yes"'),
    (
        {"X-Resume": "1", "Last-Event-ID": "7"},
        'Last-Event-ID: must be the id of an event of a stream of this server; got the text "7"',
    ),
    (
        {"X-Session-ID": "s" * 300},
        "X-Session-ID: must be a text of at most 256 characters; got a text of 300 characters that "
        f'starts with "{"s" * MAX_SHOWN_CHARS}"',
    ),
]
REPLACED = {"X-Request-Id": "no id with blanks", "X-Stainless-Read-Timeout": "NOT_GIVEN"}
"""Header -> a wrong value that is as none. Proxies and SDKs set these headers, not users."""


@pytest.mark.parametrize("operation", WITH_IDS, ids=lambda each: f"{each.method} {each.rule}")
def test_an_unknown_id_is_refused_with_its_name(
    gateway: GatewayProcess, operation: Operation
) -> None:
    (variable,) = re.findall(r"<(?:\w+:)?(\w+)>", operation.rule)
    path = re.sub("<.*>", "no such id", operation.rule)
    answer = requests.request(operation.method, gateway.url + path, timeout=HANG_S)
    error = answer.json()["error"]
    expected = NAMED_IDS[operation.rule if variable == "name" else variable]
    assert (answer.status_code, error["message"][: len(expected)]) == (404, expected)
    assert error["param"] == ("model" if variable == "name" else variable)


@pytest.mark.parametrize(("headers", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_wrong_header_is_refused_with_its_name(
    gateway: GatewayProcess, headers: dict[str, str], message: str
) -> None:
    answer = gateway.post(CHAT, BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_headers_that_proxies_and_sdks_set_refuse_nothing(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("yes")
    answer = gateway.post(CHAT, BODY | {"stream": False}, headers=REPLACED)
    assert answer.status_code == 200
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
