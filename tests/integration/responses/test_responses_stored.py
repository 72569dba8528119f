"""Stored responses: continued, read, listed and deleted from any process, but only by their
owner."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, exchange
from tests.support.responses import RESPONSES, typed_events
from tests.support.scenarios import call
from tests.support.scripted_engine import ScriptedEngine, text_of, text_reply

MODEL = "scripted"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def test_a_chain_with_tools_has_the_prompt_of_the_explicit_history(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI
) -> None:
    """Three turns are chained by `previous_response_id`, and sent to two processes."""
    answers = iter(
        [
            "<think>\nI must look.\n</think>\n\nOne moment." + call("weather", {"city": "Rom"}),
            "<think>\nSunny!\n</think>\n\nIt is sunny.",
            "Bye.",
        ]
    )
    engine.script = lambda generate: text_reply(next(answers), marked=True)
    shared: Any = {"model": MODEL, "instructions": "Be kind.", "tools": [WEATHER]}

    first = client.responses.create(input="weather?", **shared)
    (made,) = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "sunny"}
    second = elsewhere.responses.create(input=[result], previous_response_id=first.id, **shared)
    client.responses.create(input="bye", previous_response_id=second.id, **shared)

    answers = iter(["", ""])
    explicit: list[Any] = [
        {"role": "user", "content": "weather?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        result,
    ]
    client.responses.create(input=explicit, store=False, **shared)
    explicit += [item.model_dump(exclude_none=True) for item in second.output]
    explicit.append({"role": "user", "content": "bye"})
    client.responses.create(input=explicit, store=False, **shared)
    _, chained_2, chained_3, explicit_2, explicit_3 = (
        generate.prompt.tolist() for generate in engine.generates
    )
    assert chained_2 == explicit_2
    assert chained_3 == explicit_3
    assert "I must look." in text_of(chained_2)
    assert "Sunny!" in text_of(chained_3)
    assert "weather" in text_of(chained_3)
    assert "It is sunny." in text_of(chained_3)

    chat: Any = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning": "I must look.",
            "tool_calls": [
                {
                    "id": made.call_id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": made.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": made.call_id, "content": "sunny"},
    ]
    answers = iter([""])
    function = {k: v for k, v in WEATHER.items() if k != "type"}
    client.chat.completions.create(
        model=MODEL,
        messages=chat,
        tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
    )
    assert engine.generates[-1].prompt.tolist() == chained_2


def test_a_stored_response_equals_the_answer_and_only_its_owner_reads_it(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI, stranger: OpenAI
) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    made = client.responses.create(model=MODEL, input="hi", metadata={"k": "v"})
    for reader in (client, elsewhere):
        assert reader.responses.retrieve(made.id) == made
    for attempt in (
        lambda: stranger.responses.retrieve(made.id),
        lambda: stranger.responses.delete(made.id),
        lambda: stranger.responses.cancel(made.id),
        lambda: stranger.responses.input_items.list(made.id),
    ):
        with pytest.raises(NotFoundError):
            attempt()
    with pytest.raises(BadRequestError) as refused:
        stranger.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


def test_a_streamed_response_is_stored_before_its_last_event_is_sent(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI
) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    for _ in range(10):
        with client.responses.stream(model=MODEL, input="hi") as stream:
            final = stream.get_final_response()
        assert elsewhere.responses.retrieve(final.id).output_text == "Hello!"


def test_a_response_without_store_is_not_stored(engine: ScriptedEngine, client: OpenAI) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    made = client.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_after_a_deleted_one_cannot_be_continued(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI
) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    first = client.responses.create(model=MODEL, input="hi")
    second = client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
    elsewhere.responses.delete(first.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(BadRequestError, match=first.id):
        client.responses.create(model=MODEL, input="so?", previous_response_id=second.id)


def test_input_items_are_listed_page_by_page(engine: ScriptedEngine, client: OpenAI) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    said: Any = [{"role": "user", "content": f"number {n}"} for n in range(5)]
    made = client.responses.create(model=MODEL, input=said)
    newest = client.responses.input_items.list(made.id, limit=2)
    assert newest.has_more
    assert [item.content for item in newest.data] == ["number 4", "number 3"]  # type: ignore[union-attr]
    walked = [item.content for item in client.responses.input_items.list(made.id, order="asc")]  # type: ignore[union-attr]
    assert walked == [f"number {n}" for n in range(5)]
    for wrong in ({"limit": 101}, {"order": "up"}, {"after": "msg_1"}):
        with pytest.raises(BadRequestError) as refused:
            client.responses.input_items.list(made.id, **wrong)
        assert refused.value.param == next(iter(wrong))


def test_a_reference_is_replaced_by_its_item(engine: ScriptedEngine, client: OpenAI) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    made = client.responses.create(model=MODEL, input="hi")
    (asked,) = client.responses.input_items.list(made.id).data
    engine.generates.clear()
    user: Any = {"role": "user", "content": "so?"}
    references: Any = [{"type": "item_reference", "id": i} for i in (asked.id, made.output[0].id)]
    client.responses.create(model=MODEL, input=[*references, user])
    client.responses.create(model=MODEL, input=[user], previous_response_id=made.id)
    by_reference, by_chain = engine.generates
    assert by_reference.prompt.tolist() == by_chain.prompt.tolist()
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_9"}])
    assert refused.value.param == "input[0].id"


def test_a_rendered_chain_has_the_prompt_of_the_response(
    engine: ScriptedEngine, client: OpenAI, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    made = client.responses.create(model=MODEL, input="hi")
    reference = {"type": "item_reference", "id": made.output[0].id}
    body = {
        "input": [reference, {"role": "user", "content": "so?"}],
        "previous_response_id": made.id,
    }
    key = {"Authorization": "Bearer k1"}
    rendered = gateway.post(f"{RESPONSES}/render", body, headers=key)
    assert rendered.status_code == 200, rendered.text
    assert gateway.post(RESPONSES, body, headers=key).status_code == 200
    assert rendered.json()["token_ids"] == engine.generates[-1].prompt.tolist()
    assert gateway.post(f"{RESPONSES}/render", body).status_code == 400, "the owner differs"


def test_the_file_of_the_store_is_private(
    engine: ScriptedEngine, client: OpenAI, store: str
) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    client.responses.create(model=MODEL, input="hi")
    assert stat.S_IMODE(Path(store).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(store).parent.stat().st_mode) == 0o700


def test_without_a_store_requests_that_need_one_are_refused(engine: ScriptedEngine) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    with GatewayProcess(engine=engine.address, response_store="none") as gateway:
        gateway.await_ready()
        made = gateway.post(RESPONSES, {"input": "hi"}).json()
        assert made["store"] is False
        for field, value in (
            ("store", True),
            ("background", True),
            ("previous_response_id", made["id"]),
        ):
            answer = gateway.post(RESPONSES, {"input": "hi", field: value})
            assert error_of(answer, 400)["param"] == field
        gateway.await_status(f"{RESPONSES}/{made['id']}", 404)


def test_an_unusable_store_does_not_prevent_answers(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.script = lambda generate: text_reply("Hello!")
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "r.db")
    with GatewayProcess(engine=engine.address, response_store=path) as gateway:
        gateway.await_ready()
        made = gateway.post(RESPONSES, {"input": "hi"}).json()
        assert (made["status"], made["store"]) == ("completed", False)
        _, _, data = exchange(gateway.port, RESPONSES, {"input": "hi", "stream": True})
        assert typed_events(data)[-1]["response"]["store"] is False
        assert gateway.post(RESPONSES, {"input": "hi", "background": True}).status_code == 503
        engine.await_idle()
        answer = gateway.post(RESPONSES, {"input": "hi", "previous_response_id": made["id"]})
        assert answer.status_code == 503
        assert str(tmp_path) not in answer.text
