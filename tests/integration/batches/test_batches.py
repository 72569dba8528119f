"""Batches through the official SDK: their states, their results, and who may see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import openai
import pytest
import requests
from openai import OpenAI

from protocol.engine.messages import Generate
from protocol.wire.errors import ErrorInfo
from tests.support.batches import batch_line, complaints, completion_lines, jsonl
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of
from tests.support.scripted_engine import Reply, ScriptedEngine, text_of, text_reply
from tests.support.waiting import eventually

FINAL = ("completed", "failed", "expired", "cancelled")
COMPLETIONS: Final = "/v1/completions"
CHAT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/responses", "/v1/embeddings"


def uploaded(client: OpenAI, lines: Sequence[dict[str, Any]] | bytes) -> str:
    data = lines if isinstance(lines, bytes) else jsonl(lines).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def created(
    client: OpenAI, lines: Sequence[dict[str, Any]] | bytes, url: Any = COMPLETIONS, **options: Any
) -> Any:
    options = {"completion_window": "24h"} | options
    file = uploaded(client, lines)
    return client.batches.create(input_file_id=file, endpoint=url, **options)


def has_ended(batch: Any) -> bool:
    return batch.status in FINAL


def awaited(client: OpenAI, batch: str, wanted: Callable[[Any], bool] = has_ended) -> Any:
    """Wait until `wanted` accepts a batch, and return the batch."""

    def found() -> Any:
        now = client.batches.retrieve(batch)
        return now if wanted(now) else None

    done = eventually(found)
    assert done is not None, client.batches.retrieve(batch)
    return done


def rows_of(client: OpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(line) for line in client.files.content(file).read().splitlines()]


def echo(generate: Generate) -> Reply:
    return text_reply(f"answer to {len(generate.prompt.tolist())} tokens", size=9)


def test_a_batch_answers_every_line_in_order(engine: ScriptedEngine, client: OpenAI) -> None:
    engine.script = echo
    lines = completion_lines(60)
    metadata = {"purpose": "test"}
    batch = created(client, lines, metadata=metadata)
    assert batch.status in ("validating", "in_progress", "finalizing", "completed")
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", COMPLETIONS, "24h")
    assert batch.expires_at - batch.created_at == 86400
    done = awaited(client, batch.id)
    assert done.status == "completed"
    assert (done.metadata, done.input_file_id) == (metadata, batch.input_file_id)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (60, 60, 0)
    times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert times == sorted(times)
    assert done.error_file_id is None
    rows = rows_of(client, done.output_file_id)
    assert complaints(lines, rows) == []
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]
    output = client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


CHAT_BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "seed": 7,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "max_tokens": 12,
}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["a", "bc"], "echo": True, "logprobs": 1, "seed": 3},
    CHAT: CHAT_BODY,
    RESPONSES: {"input": "hi", "store": False, "temperature": 0.5},
    EMBEDDINGS: {"input": ["hi", "sea"], "encoding_format": "base64"},
}
BAD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"temperature": 99},
    CHAT: {"temperature": 99},
    RESPONSES: {"temperature": 99},
    EMBEDDINGS: {"dimensions": 99},
}
OWN = {"id", "created", "created_at", "completed_at"}
"""Fields that differ between two answers to the same request."""


def without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_own(each) for name, each in value.items() if name not in OWN}
    return [without_own(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("url", BODIES)
def test_a_line_gets_the_answer_that_a_request_over_http_gets(
    engine: ScriptedEngine, client: OpenAI, gateway: GatewayProcess, url: str
) -> None:
    engine.script = echo
    bad = {**BODIES[url], **BAD[url]}
    unknown = {**BODIES[url], "model": "nobody's"}
    bodies = {"good": BODIES[url], "bad": bad, "unknown": unknown}
    done = awaited(client, created(client, [batch_line(*e, url) for e in bodies.items()], url).id)
    assert done.request_counts.failed == 2
    rows = [*rows_of(client, done.output_file_id), *rows_of(client, done.error_file_id)]
    assert [row["custom_id"] for row in rows] == list(bodies)
    for row in rows:
        over_http = gateway.post(url, bodies[row["custom_id"]])
        response = row["response"]
        assert response["status_code"] == over_http.status_code
        assert without_own(response["body"]) == without_own(over_http.json())
        assert row["error"] is None
        assert response["request_id"]


def test_lines_have_a_low_priority_and_the_requests_of_clients_do_not(
    engine: ScriptedEngine, client: OpenAI, gateway: GatewayProcess
) -> None:
    engine.script = echo
    lines = [batch_line("a", {"prompt": "batch"}), batch_line("b", {"prompt": "x", "priority": -9})]
    awaited(client, created(client, lines).id)
    gateway.post(COMPLETIONS, {"prompt": "interactive"})
    assert [generate.priority for generate in engine.generates] == [100, 100, 0]


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"{}\n", "invalid_line", 1),
        (b"\n\nnonsense\n", "invalid_json_line", 3),
        (jsonl([batch_line("a", {}), batch_line("a", {})]).encode(), "duplicate_custom_id", 2),
        (jsonl([batch_line("a", {}, CHAT)]).encode(), "invalid_line", 1),
        (jsonl([batch_line("a", {"stream": True})]).encode(), "invalid_line", 1),
    ],
)
def test_a_malformed_input_fails_the_batch_and_names_the_line(
    engine: ScriptedEngine, client: OpenAI, data: bytes, code: str, line: int | None
) -> None:
    done = awaited(client, created(client, data).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at is not None
    (problem,) = done.errors.data
    assert (problem.code, problem.line) == (code, line)
    assert engine.generates == []


def test_a_batch_is_cancelled_and_keeps_its_results_so_far(
    engine: ScriptedEngine, client: OpenAI
) -> None:
    def script(generate: Generate) -> Reply:
        if len(engine.generates) > 3:
            engine.step_s = 3600.0
        return echo(generate)

    engine.script = script
    batch = created(client, completion_lines(50))
    engine.await_generates(4)
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    engine.step_s = 0.001
    done = awaited(client, batch.id)
    assert done.status == "cancelled"
    assert done.cancelled_at >= done.cancelling_at
    counts = done.request_counts
    assert counts.total == 50
    assert counts.completed + counts.failed < 50
    rows = rows_of(client, done.output_file_id)
    assert len(rows) == counts.completed
    engine.await_idle()
    assert {*engine.abort_reasons.values()} == {"cancelled"}
    again = [batch for batch in client.batches.list() if batch.id == done.id]
    assert again == [done]
    with pytest.raises(openai.BadRequestError, match="a batch that is cancelled cannot"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize("num_bytes", [0, 300_000], ids=["short", "long"])
def test_refusals_are_retried_and_never_results(
    engine: ScriptedEngine, client: OpenAI, num_bytes: int
) -> None:
    """Long lines are read again from the file, whose pieces are shorter."""
    refused: set[tuple[int, ...]] = set()

    def refuse_once(generate: Generate) -> Reply:
        prompt = tuple(generate.prompt.tolist())
        if prompt in refused:
            return echo(generate)
        refused.add(prompt)
        return ErrorInfo(code="overloaded", message="full", retry_after_s=0.01)

    engine.script = refuse_once
    lines = completion_lines(4, max_tokens=64)
    for line in lines:
        line["body"]["unknown"] = "x" * num_bytes
    done = awaited(client, created(client, lines).id)
    rows = rows_of(client, done.output_file_id)
    assert complaints(lines, rows) == []
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert texts == {
        line["custom_id"]: f"answer to {len(line['body']['prompt'])} tokens" for line in lines
    }
    assert len(refused) == 4


def test_a_batch_that_is_refused_does_not_hold_up_another(
    engine: ScriptedEngine, client: OpenAI
) -> None:
    """The refused lines wait a minute each. There are more of them than slots."""
    full = ErrorInfo(code="overloaded", message="full", retry_after_s=60)
    engine.script = lambda g: echo(g) if text_of(g.prompt.tolist()) == "free" else full
    refused = created(client, completion_lines(100))
    engine.await_generates(8)
    done = awaited(client, created(client, [batch_line("a", {"prompt": "free"})]).id)
    assert done.request_counts.completed == 1
    client.batches.cancel(refused.id)
    assert awaited(client, refused.id).status == "cancelled"


def test_batches_are_listed_in_pages_and_only_for_their_owner(
    engine: ScriptedEngine, client: OpenAI, stranger: OpenAI
) -> None:
    ids = [created(client, b"").id for _ in range(5)]
    newest = client.batches.list(limit=2)
    assert [batch.id for batch in newest.data] == ids[:2:-1]
    assert newest.has_more
    assert [batch.id for batch in client.batches.list(limit=2)][:5] == ids[::-1]
    assert stranger.batches.list().data == []
    for attempt in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            attempt(ids[0])
    file = client.batches.retrieve(ids[0]).input_file_id
    with pytest.raises(openai.BadRequestError, match="input_file_id"):
        stranger.batches.create(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="after: nothing in this list has this id"):
        client.batches.list(after="batch_unknown")
    for batch in ids:
        awaited(client, batch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completion_window", "soon"),
        ("completion_window", "31d"),
        ("endpoint", "/v1/models"),
        ("input_file_id", "file-unknown"),
        ("metadata", {"a": "x" * 513}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    client: OpenAI, gateway: GatewayProcess, field: str, value: Any
) -> None:
    body = {
        "input_file_id": uploaded(client, b"{}"),
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
    }
    headers = {"Authorization": "Bearer k1"}
    answer = gateway.post("/v1/batches", {**body, field: value}, headers=headers)
    assert error_of(answer, 400)["param"].startswith(field)


def test_the_input_of_an_open_batch_cannot_be_deleted(
    engine: ScriptedEngine, client: OpenAI
) -> None:
    engine.script, engine.is_paused = echo, True
    batch = created(client, completion_lines(2))
    engine.await_generates(2)
    with pytest.raises(openai.BadRequestError, match="reads this file"):
        client.files.delete(batch.input_file_id)
    engine.is_paused = False
    done = awaited(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted
    assert client.batches.retrieve(batch.id) == done
    assert len(rows_of(client, done.output_file_id)) == 2


def test_the_metrics_count_no_open_answer_after_a_cancelled_batch(
    engine: ScriptedEngine, client: OpenAI, gateway: GatewayProcess
) -> None:
    engine.script, engine.is_paused = echo, True
    batch = created(client, completion_lines(3))
    engine.await_generates(3)
    client.batches.cancel(batch.id)
    engine.is_paused = False
    assert awaited(client, batch.id).status == "cancelled"
    text = requests.get(f"{gateway.url}/metrics", timeout=20).text
    assert "tidegate_open_answers 0.0" in text
