"""The reference at /docs, in a browser."""

from __future__ import annotations

import json
import shlex
from typing import Any

from gateway.app import encoded_document
from tests.integration.page.conftest import Visitor
from tests.support.scripted_engine import ScriptedEngine

DOCUMENT = json.loads(encoded_document())
OPERATIONS = {
    operation["operationId"]: (path, operation)
    for path, item in DOCUMENT["paths"].items()
    for operation in item.values()
}
SUMMARY = """() => [...document.querySelectorAll("details.operation")].map((each) => {
  each.open = true;
  return each.id;
})"""


def test_every_operation_is_described(visit: Visitor) -> None:
    page = visit().open("/reference")
    ids = page.evaluate(SUMMARY)
    assert sorted(ids) == sorted(OPERATIONS)
    page.wait_for_function(
        "shown => document.querySelectorAll('.operation-body').length === shown", arg=len(ids)
    )
    for name, (path, operation) in OPERATIONS.items():
        text = page.locator(f"details#{name}").inner_text()
        assert path in text
        assert operation["summary"] in text
        for parameter in operation.get("parameters", ()):
            assert parameter["name"] in text
            assert parameter["description"].replace("`", "") in text
        for status in operation["responses"]:
            assert f"{status} " in text


def test_recursive_schemas_are_opened_level_by_level(visit: Visitor) -> None:
    page = visit().open("/reference#post_v1_chat_completions")
    body = page.locator("details#post_v1_chat_completions .operation-body")
    body.get_by_text("temperature", exact=True).wait_for()
    assert "number or null, 0 to 2" in body.inner_text()
    for _ in range(3):
        nested = body.locator(".fields details:not([open]) > summary").first
        before = body.locator("code.name").count()
        nested.click()
        page.wait_for_function(
            "before => document.querySelectorAll('[open] code.name').length > before", arg=before
        )


def test_operations_are_found_by_path_and_by_field(visit: Visitor) -> None:
    page = visit().open("/reference")
    search = page.get_by_label("Search routes and fields")
    shown = page.locator(".docs-menu li:visible")
    assert shown.count() == len(OPERATIONS)
    search.fill("anthropic count")
    assert [text.split()[-1] for text in shown.all_inner_texts()] == ["/v1/messages/count_tokens"]
    search.fill("frequency_penalty")
    assert 0 < shown.count() < len(OPERATIONS)
    search.fill("no such thing")
    page.get_by_text("No route or field matches.").wait_for()


def test_a_link_to_a_route_that_the_search_has_hidden_shows_it(visit: Visitor) -> None:
    page = visit().open("/reference")
    page.get_by_label("Search routes and fields").fill("no such thing")
    page.evaluate("location.hash = 'post_v1_chat_completions'")
    page.locator("details#post_v1_chat_completions[open]").wait_for()
    assert page.get_by_label("Search routes and fields").input_value() == ""


def test_a_request_is_tried_and_its_stream_is_shown(visit: Visitor, engine: ScriptedEngine) -> None:
    page = visit(refused=(400,)).open("/reference#post_v1_chat_completions")
    form = page.locator("#post_v1_chat_completions form.try")
    form.get_by_role("button", name="Send").click()
    form.get_by_text("200 OK").wait_for()
    form.get_by_text('"content": "Hello, world!"').wait_for()
    body = form.get_by_label("Body")
    body.fill(json.dumps({**json.loads(body.input_value()), "stream": True}))
    form.get_by_role("button", name="Send").click()
    form.get_by_text("data: [DONE]").wait_for()
    body.fill('{"messages": []}')
    form.get_by_role("button", name="Send").click()
    form.get_by_text("400 BAD REQUEST").wait_for()
    form.get_by_text('"param": "messages"').wait_for()


def test_variables_and_queries_are_entered(visit: Visitor) -> None:
    visitor = visit(refused=(404,))
    page = visitor.open("/reference#get_v1_models_name")
    form = page.locator("#get_v1_models_name form.try")
    form.get_by_label("name", exact=True).fill("scripted")
    form.get_by_role("button", name="Send").click()
    form.get_by_text('"id": "scripted"').wait_for()
    form.get_by_label("name", exact=True).fill("a b/c?d")
    form.get_by_role("button", name="Send").click()
    form.get_by_text("404 NOT FOUND").wait_for()
    assert visitor.requests[-1].endswith("/v1/models/a%20b%2Fc%3Fd")


NO_VECTORS = "generates text, and has no embeddings"
NOT_MANAGED = "models are managed by the operator"
REFUSED = {
    "delete_api_delete": NOT_MANAGED,
    "post_api_copy": NOT_MANAGED,
    "post_api_embed": NO_VECTORS,
    "post_api_embeddings": NO_VECTORS,
    "post_infill": "this model cannot fill in the middle",
    "post_pooling": NO_VECTORS,
    "post_rerank": NO_VECTORS,
    "post_score": NO_VECTORS,
    "post_v1_batches": "input_file_id: no",
    "post_v1_chat_completions_derender": "chat_request: required",
    "post_v1_completions_derender": "generate_responses: required",
    "post_v1_embeddings": NO_VECTORS,
    "post_v1_rerank": NO_VECTORS,
    "post_v1_score": NO_VECTORS,
    "post_v2_rerank": NO_VECTORS,
}
"""Operations whose examples are refused, and why: the scripted model lacks an ability, the operator
does not allow it, or the body needs a file or an answer that no example can have."""


def test_the_examples_of_bodies_can_be_sent_as_they_are(visit: Visitor) -> None:
    page = visit(refused=(400, 403, 404)).open("/reference")
    page.evaluate(SUMMARY)
    for name, (_, operation) in OPERATIONS.items():
        if "application/json" in operation.get("requestBody", {}).get("content", {}):
            form = page.locator(f"#{name} form.try")
            form.get_by_role("button", name="Send").click()
            form.locator(".facts", has_text=" ms").wait_for()
            assert REFUSED.get(name, "200 OK") in form.locator(".result").inner_text(), name


def test_a_file_is_uploaded(visit: Visitor) -> None:
    visitor = visit()
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visitor.open("/reference#post_v1_files")
    form = page.locator("#post_v1_files form.try")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    data = json.dumps(line).encode()
    file: Any = {"name": "in.jsonl", "mimeType": "application/jsonl", "buffer": data}
    form.get_by_label("file", exact=True).set_input_files(file)
    form.get_by_role("button", name="Send").click()
    form.get_by_text('"filename": "in.jsonl"').wait_for()
    form.get_by_role("button", name="Copy as curl").click()
    command = page.evaluate("navigator.clipboard.readText()")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[0] == "curl"
    assert words[2:] == ["-F", "file=@in.jsonl", "-F", "purpose=batch"]
