"""Background responses: they continue without their client, can be followed and cancelled from any
process, and end even if the process that runs them dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from openai import OpenAI

from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, read_head, send_post
from tests.support.processes import descendants_of
from tests.support.responses import RESPONSES, items_of, kinds, typed_events
from tests.support.scripted_engine import ScriptedEngine, text_reply
from tests.support.waiting import HANG_S, eventually

MODEL = "scripted"
TEXT = "one two three four five six seven eight nine ten"
KEY = {"Authorization": "Bearer k1"}
SLOW_S = 1.0
"""Seconds per step. TEXT then takes more than ten seconds, so a test sees it in progress."""
OPEN_S = 0.1
"""Seconds per step for TEXT * 100, which then takes minutes. So it is still open when a test kills
its process or cancels it, on a busy machine too."""


def start(client: OpenAI, **options: Any) -> Any:
    return client.responses.create(model=MODEL, input="hi", background=True, **options)


def awaited(client: OpenAI, name: str, wanted: Callable[[str], bool]) -> Any:
    """Wait until `wanted` accepts the status of a response, and return the response."""

    def found() -> Any:
        response = client.responses.retrieve(name)
        return response if wanted(response.status or "") else None

    response = eventually(found)
    assert response is not None, f"still {client.responses.retrieve(name).status}"
    return response


def is_over(status: str) -> bool:
    return status not in ("queued", "in_progress")


def frames_of(gateway: GatewayProcess, name: str, after: int | None = None) -> bytes:
    """Return the stream of a stored response after event number `after`; None: the whole stream."""
    params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    answer = requests.get(
        f"{gateway.url}{RESPONSES}/{name}", params=params, headers=KEY, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return answer.content


def await_stored_text(gateway: GatewayProcess, name: str) -> None:
    """Wait until the store has some text of a response that another process makes."""
    with requests.get(
        f"{gateway.url}{RESPONSES}/{name}",
        params={"stream": "true"},
        headers=KEY,
        stream=True,
        timeout=HANG_S,
    ) as answer:
        assert any(b"response.output_text.delta" in line for line in answer.iter_lines())


def test_a_background_response_completes_without_its_client(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI
) -> None:
    engine.script = lambda generate: text_reply(TEXT)
    engine.step_s, engine.is_paused = SLOW_S, True
    made = start(client)
    assert (made.status, made.background) == ("queued", True)
    assert elsewhere.responses.retrieve(made.id).status == "queued"
    engine.is_paused = False
    assert awaited(elsewhere, made.id, lambda status: status != "queued").status == "in_progress"
    engine.step_s = 0.001
    done = awaited(elsewhere, made.id, is_over)
    assert (done.status, done.output_text) == ("completed", TEXT)
    assert done.usage.output_tokens == len(TEXT) + 1
    assert client.responses.retrieve(made.id) == done


def test_events_can_be_followed_from_any_process_and_any_position(
    engine: ScriptedEngine, client: OpenAI, gateway: GatewayProcess, twin: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply(f"<think>\nhm\n</think>\n\n{TEXT}", marked=True)
    engine.step_s = 0.005
    made = start(client)
    while_made = frames_of(twin, made.id)
    afterwards = frames_of(gateway, made.id)
    assert while_made == afterwards
    events = typed_events(afterwards)
    assert kinds(events)[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert items_of(events) == events[-1]["response"]["output"]
    frames = afterwards.split(b"\n\n")
    for after in (0, 3, len(events) - 2):
        rest = frames_of(twin, made.id, after)
        assert rest.split(b"\n\n") == frames[after + 1 :]
    assert frames_of(twin, made.id, len(events) - 1) == b""


def test_the_first_client_can_stream_a_response_and_leave(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI, twin: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply(TEXT)
    engine.step_s = 0.005
    received = list(start(client, stream=True))
    assert [event.sequence_number for event in received] == list(range(len(received)))
    name = received[0].response.id
    assert [e["type"] for e in typed_events(frames_of(twin, name))] == [e.type for e in received]

    engine.step_s = 0.02
    stream = start(client, stream=True)
    first = [next(stream) for _ in range(6)]
    stream.close()
    name, after = first[0].response.id, first[-1].sequence_number
    rest = typed_events(frames_of(twin, name, after))
    assert rest[0]["sequence_number"] == after + 1
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    assert awaited(elsewhere, name, is_over).status == "completed"


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_background_response_can_be_cancelled_from_any_process(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI, twin: GatewayProcess, where: str
) -> None:
    engine.script = lambda generate: text_reply(TEXT * 100)
    engine.step_s = OPEN_S
    made = start(client)
    awaited(client, made.id, lambda status: status == "in_progress")
    cancelled = (client if where == "here" else elsewhere).responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    item: Any = cancelled.output[0]
    assert item.status == "incomplete"
    engine.await_abort(engine.generates[0].request)
    assert [*engine.abort_reasons.values()] == ["cancelled"]
    assert typed_events(frames_of(twin, made.id))[-1]["response"]["status"] == "cancelled"
    assert client.responses.cancel(made.id) == cancelled  # unchanged


def test_a_deleted_response_is_aborted(
    engine: ScriptedEngine, client: OpenAI, elsewhere: OpenAI
) -> None:
    engine.script = lambda generate: text_reply(TEXT * 100)
    engine.step_s = OPEN_S
    made = start(client)
    elsewhere.responses.delete(made.id)
    engine.await_abort(engine.generates[0].request)


def test_an_invalid_background_request_is_refused_at_once(
    client: OpenAI, gateway: GatewayProcess
) -> None:
    answer = gateway.post(RESPONSES, {"input": [], "background": True})
    assert answer.status_code == 400
    answer = gateway.post(RESPONSES, {"input": "hi", "background": True, "store": False})
    assert answer.json()["error"]["param"] == "background"
    plain = client.responses.create(model=MODEL, input="hi")
    answer = requests.get(
        f"{gateway.url}{RESPONSES}/{plain.id}", params={"stream": "true"}, headers=KEY, timeout=9
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    for wrong in ("-1", "x", "9" * 40):
        answer = requests.get(
            f"{gateway.url}{RESPONSES}/{plain.id}",
            params={"stream": "true", "starting_after": wrong},
            headers=KEY,
            timeout=9,
        )
        assert answer.status_code == 400


@pytest.fixture
def doomed(engine: ScriptedEngine, store: str) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine=engine.address, response_store=store) as gateway:
        yield gateway.await_ready()


def workers_of(gateway: GatewayProcess) -> list[int]:
    return [pid for pid, _ in descendants_of(gateway.process.pid)]


def test_a_killed_process_leaves_no_response_open(
    engine: ScriptedEngine, doomed: GatewayProcess, client: OpenAI, twin: GatewayProcess
) -> None:
    """Every reader sees that the response failed, and its stream ends with `response.failed`."""
    engine.script = lambda generate: text_reply(TEXT * 100)
    engine.step_s = OPEN_S
    with OpenAI(base_url=f"{doomed.url}/v1", api_key="k1", max_retries=0) as sdk:
        made = start(sdk)
        await_stored_text(twin, made.id)
    for pid in [doomed.process.pid, *workers_of(doomed)]:
        os.kill(pid, signal.SIGKILL)
    stream = frames_of(twin, made.id)
    died = awaited(client, made.id, is_over)
    assert (died.status, died.error.code) == ("failed", "server_error")
    events = typed_events(stream)
    assert events[-1]["type"] == "response.failed"
    assert events[-2]["type"] == "response.output_text.delta"
    # A client may have received more events than were stored.
    late = typed_events(frames_of(twin, made.id, 1 << 40))
    assert [event["type"] for event in late] == ["response.failed"]
    engine.lose_clients()


def test_a_drain_waits_for_background_responses(
    engine: ScriptedEngine, client: OpenAI, store: str
) -> None:
    engine.script = lambda generate: text_reply(TEXT)
    engine.step_s = SLOW_S
    with GatewayProcess(
        engine=engine.address, response_store=store, drain_s=10 * HANG_S
    ) as leaving:
        leaving.await_ready()
        with OpenAI(base_url=f"{leaving.url}/v1", api_key="k1", max_retries=0) as sdk:
            made = start(sdk)
            awaited(sdk, made.id, lambda status: status == "in_progress")
        engine.step_s = 0.02
        leaving.process.send_signal(signal.SIGTERM)
        assert leaving.wait() == 0
    assert client.responses.retrieve(made.id).output_text == TEXT


def test_a_drain_ends_although_a_response_is_not_complete(
    engine: ScriptedEngine, client: OpenAI, store: str
) -> None:
    engine.script = lambda generate: text_reply(TEXT * 100)
    engine.step_s = OPEN_S
    with GatewayProcess(engine=engine.address, response_store=store, drain_s=0.5) as leaving:
        leaving.await_ready()
        with OpenAI(base_url=f"{leaving.url}/v1", api_key="k1", max_retries=0) as sdk:
            made = start(sdk)
            await_stored_text(leaving, made.id)
        leaving.process.send_signal(signal.SIGTERM)
        assert leaving.wait() == 0
    ended = client.responses.retrieve(made.id)
    assert ended.status == "failed"
    assert ended.output_text
    assert TEXT.startswith(ended.output_text[: len(TEXT)])


def test_a_background_response_is_logged_when_it_ends(
    engine: ScriptedEngine, client: OpenAI, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply(TEXT)
    before = len(gateway.err)
    awaited(client, start(client).id, is_over)
    words = f"POST {RESPONSES} 200", f"generated_tokens={len(TEXT) + 1} finish=stop"
    # The line is written, and read by us, after the response has ended.
    assert eventually(
        lambda: any(all(word in line for word in words) for line in gateway.err[before:])
    )


def test_a_client_that_hangs_up_at_once_changes_nothing(
    engine: ScriptedEngine, client: OpenAI, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply(TEXT)
    engine.step_s = 0.01
    body = {"input": "hi", "background": True, "stream": True}
    with connect(gateway.port) as raw, raw.makefile("rb") as file:
        send_post(raw, RESPONSES, body, headers=KEY)
        read_head(file)
        name = file.read(200).partition(b'"id":"')[2].partition(b'"')[0].decode()
    assert awaited(client, name, is_over).output_text == TEXT


def test_stored_responses_survive_a_restart(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.script = lambda generate: text_reply(TEXT)
    path = str(tmp_path / "r.db")
    names = []
    for _ in range(2):
        with GatewayProcess(engine=engine.address, response_store=path) as gateway:
            gateway.await_ready()
            with OpenAI(base_url=f"{gateway.url}/v1", api_key="k1", max_retries=0) as sdk:
                names.append(sdk.responses.create(model=MODEL, input="hi").id)
                assert [sdk.responses.retrieve(name).output_text for name in names] == [TEXT] * len(
                    names
                )
