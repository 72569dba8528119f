"""Errors of the gateway: what is refused and how, and what happens if a client or the engine is
lost."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from protocol.engine.messages import Generate
from protocol.engine.sampling import check_vocabulary
from protocol.wire.errors import ErrorInfo, InvalidRequest
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, exchange, metric_of, read_body, read_head, send_post
from tests.support.scripted_engine import ScriptedEngine, TokenReply, ids_of, text_of, text_reply
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


GATEWAY = {
    "served_name": ["main", "alias"],
    "max_body_mib": 1,
    "max_n": 8,
    "max_prompts": 4,
    "keep_alive_s": 3600,  # a hang-up is seen by itself, not by a write that fails
}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", **fields}


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


BAD_BODIES: list[tuple[str, Any, str | None]] = [
    (CHAT, b"", None),
    (CHAT, b"{", None),
    (CHAT, b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": HI * 10_000}, "messages"),
    (CHAT, {"messages": [{"role": "martian", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": deep(100)}]}, "messages"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=9), "n"),
    (CHAT, chat(timeout_s=0), "timeout_s"),
    (CHAT, chat(timeout_s=1e9), "timeout_s"),
    (CHAT, chat(queue_timeout_s=0), "queue_timeout_s"),
    (CHAT, chat(queue_timeout_s=1e9), "queue_timeout_s"),
    (CHAT, chat(max_completion_tokens=10**400), "max_completion_tokens"),
    (CHAT, b'{"temperature": 1e999, "messages": []}', "temperature"),
    (CHAT, chat(logit_bias={"-1": 1}), "logit_bias.-1"),
    (CHAT, chat(stop=[str(i) for i in range(17)]), "stop"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a", ""]), "stop[1]"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(stream_options={}), "stream_options"),
    (CHAT, chat(priority=1 << 40), "priority"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (CHAT, chat(tools=[{"deep": deep(100)}]), "tools"),
    (CHAT, chat(tools=[{"wide": [0] * 300_000}]), "tools"),
    (CHAT, chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
    (COMPLETIONS, text(prompt=[[]]), "prompt[0]"),
    (COMPLETIONS, text(prompt=[[1], [-1]]), "prompt[1][0]"),
    (COMPLETIONS, text(prompt=["x"] * 5), "prompt"),
    (COMPLETIONS, text(prompt=["x"] * 4, n=8), "n"),
    (COMPLETIONS, text(max_tokens=0), "max_tokens"),
    (COMPLETIONS, text(suffix="end"), "suffix"),
    (COMPLETIONS, text(prompt=[1, 259]), "prompt[1]"),
    (COMPLETIONS, text(prompt=[[1], [2, 259]]), "prompt[1][1]"),
    (CHAT, chat(logit_bias={"1": 1, "99999999999": 1}), "logit_bias.99999999999"),
    ("/detokenize", {"tokens": [5, 259]}, "tokens[1]"),
]
"""Bodies that the structs accept, bounds that SamplingParams does not have, and JSON that is hard
to read. `test_field_names.py` breaks the type and each bound of every field."""


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "param"), BAD_BODIES, ids=[f"{p[4:]} {str(b)[:60]}" for p, b, _ in BAD_BODIES]
)
def test_a_bad_body_is_refused_by_name_and_never_reaches_the_engine(
    path: str,
    body: Any,
    param: str | None,
    is_stream: bool,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    if (
        is_stream
        and isinstance(body, dict)
        and "stream_options" not in body
        and "stream" not in body
    ):
        body = {**body, "stream": True}
    status, headers, data = exchange(gateway.port, path, body)
    assert (status, headers["content-type"]) == (400, "application/json")
    error = json.loads(data)["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None
    assert error["message"]
    assert "$" not in error["message"]
    assert len(error["message"]) < 500
    assert engine.generates == []


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        (CHAT, chat(), ""),
        (COMPLETIONS, text(), ""),
        ("/v1/responses", {"input": "hi"}, ""),
        ("/v1/messages", {"messages": HI, "model": "main", "max_tokens": 5}, ""),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params."),
    ],
)
@pytest.mark.parametrize(
    ("field", "value", "element"),
    [
        ("logit_bias", {"5": 1, "99999999": 1}, "logit_bias.99999999"),
        ("stop_token_ids", [5, 259], "stop_token_ids[1]"),
        ("allowed_token_ids", [5, 6, 259], "allowed_token_ids[2]"),
    ],
)
def test_an_engine_refusal_names_the_element_as_the_client_spelled_it(
    path: str,
    body: dict[str, Any],
    prefix: str,
    field: str,
    value: Any,
    element: str,
    is_stream: bool,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
) -> None:
    engine.script = checks_vocabulary
    fields = {field: value}
    said = {"sampling_params": fields} if prefix else fields
    status, _, data = exchange(gateway.port, path, {**body, **said, "stream": is_stream})
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, prefix + element)
    assert error["message"].startswith(f"{prefix}{element}: token id ")


def checks_vocabulary(generate: Generate) -> ErrorInfo:
    """Refuse token ids outside the vocabulary, as the engine does."""
    with pytest.raises(InvalidRequest) as caught:
        check_vocabulary(generate.params, 259)
    return caught.value.info()


def error_of(response: requests.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_errors_of_http_itself_have_the_same_shape(gateway: GatewayProcess) -> None:
    plain = {"Content-Type": "text/plain"}
    answers = {
        404: requests.post(gateway.url + "/v1/nothing", timeout=5),
        405: requests.get(gateway.url + CHAT, timeout=5),
        413: requests.post(gateway.url + CHAT, data=b" " * (2 << 20), timeout=5),
        415: requests.post(gateway.url + CHAT, data=b"{}", headers=plain, timeout=5),
    }
    for status, response in answers.items():
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"
        assert response.headers["x-request-id"]
    assert "POST" in answers[405].headers["Allow"]
    assert error_of(answers[405])["message"] == f"GET is not allowed on {CHAT}; allowed: POST"
    assert "with the header Content-Type: application/json" in error_of(answers[415])["message"]


@pytest.mark.parametrize(
    ("method", "path", "near"),
    [
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions/", "POST /v1/chat/completions"),
        ("POST", "/v1/response", "POST /v1/responses"),
        ("GET", "/v1/model", "GET /v1/models"),
        ("POST", "/v1/nothing-of-the-kind", "GET /openapi.json"),
        ("POST", "/" + "v1/" * 1000, "GET /openapi.json"),
    ],
)
def test_an_unknown_path_is_answered_with_similar_routes(
    gateway: GatewayProcess, method: str, path: str, near: str
) -> None:
    response = requests.request(method, gateway.url + path, timeout=5)
    message = error_of(response)["message"]
    assert response.status_code == 404
    assert message.startswith(f"there is no route {method} {path[:100]}")
    assert near in message
    assert len(message) < 1000
    theirs = requests.post(gateway.url + "/v1/messages/count_token", timeout=5).json()
    assert "POST /v1/messages/count_tokens" in theirs["error"]["message"]


def test_a_body_of_unannounced_length_is_bounded_too(gateway: GatewayProcess) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    try:
        status = requests.post(gateway.url + CHAT, data=chunks(), timeout=5).status_code
    except requests.ConnectionError:  # refused while we were still sending
        status = 413
    assert status == 413
    body = json.dumps(text()).encode()
    assert requests.post(gateway.url + COMPLETIONS, data=iter([body]), timeout=5).status_code == 200


def test_an_unknown_model_is_a_404_that_lists_the_names(gateway: GatewayProcess) -> None:
    for response in (
        gateway.post(CHAT, chat(model="other")),
        gateway.post(COMPLETIONS, text(model="other", stream=True)),
        gateway.post("/tokenize", text(model="other")),
        requests.get(gateway.url + "/v1/models/other", timeout=5),
    ):
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "model_not_found"
        assert "main" in error["message"]
        assert "alias" in error["message"]


def test_every_served_name_works_and_is_echoed(gateway: GatewayProcess) -> None:
    listed = requests.get(gateway.url + "/v1/models", timeout=5).json()
    assert [model["id"] for model in listed["data"]] == ["main", "alias"]
    assert listed["data"][0]["max_model_len"] == 512
    for name in ("main", "alias"):
        assert gateway.post(CHAT, chat(model=name)).json()["model"] == name
        assert requests.get(gateway.url + f"/v1/models/{name}", timeout=5).json()["id"] == name


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_busy_engine_is_429_with_the_time_to_wait_before_any_header_of_a_stream(
    is_stream: bool, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    busy = ErrorInfo(code="overloaded", message="1,024 requests are waiting", retry_after_s=2.5)
    engine.script = lambda generate: busy
    response = gateway.post(CHAT, chat(stream=is_stream))
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "3"
    assert response.headers["Content-Type"] == "application/json"
    assert error_of(response)["code"] == "overloaded"


def test_if_one_of_n_is_refused_the_others_are_aborted(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    busy = ErrorInfo(code="overloaded", message="full")
    engine.is_paused = True
    engine.script = lambda generate: busy if generate.params.seed == 6 else text_reply("x" * 99)
    assert gateway.post(CHAT, chat(n=4, seed=5, stream=True)).status_code == 429
    engine.await_generates(4)
    first = engine.generates[0].request
    for number in (first, first + 2, first + 3):
        engine.await_abort(number)


def test_an_engine_error_about_the_prompt_names_the_messages(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    words = "the prompt is 600 tokens; this model takes 512 tokens of prompt and answer together"
    engine.script = lambda generate: ErrorInfo(
        code="context_length_exceeded", message=words, param="prompt"
    )
    for path, body, param in ((CHAT, chat(), "messages"), (COMPLETIONS, text(), "prompt")):
        response = gateway.post(path, body)
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
        assert error["message"] == words


def test_a_failed_step_is_500_with_an_id_and_no_detail(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    secret = ErrorInfo(code="step_failed", message="CUDA error at /private/path")
    engine.script = lambda generate: text_reply("some text", finish="error", error=secret)
    response = gateway.post(CHAT, chat())
    assert response.status_code == 500
    error = error_of(response)
    assert "error id" in error["message"]
    assert "private" not in response.text
    assert error["type"] == "server_error"


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    failure = ErrorInfo(code="step_failed", message="it broke")
    engine.step_s = 0.02  # the stream has begun before the first step
    engine.script = lambda generate: (
        text_reply("some text", finish="error", error=failure)
        if generate.params.seed == 1
        else text_reply("y" * 4000)
    )
    status, _, data = exchange(gateway.port, CHAT, chat(stream=True, n=2, seed=1))
    assert status == 200
    *_, error, done, end = data.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "server_error"
    said = "".join(
        event["choices"][0]["delta"].get("content", "")
        for event in map(json.loads, (f[6:] for f in data.split(b"\n\n")[:-3]))
        if event["choices"][0]["index"] == 0
    )
    assert said == "some text"
    engine.await_abort(engine.generates[-1].request)


LINGER_RESET = struct.pack("ii", 1, 0)


LEFT: dict[str, tuple[dict[str, Any], int]] = {
    CHAT: (chat(n=2), 2),
    "/v1/responses": ({"input": "hi"}, 1),
    "/v1/messages": ({"messages": HI, "model": "main", "max_tokens": 5}, 1),
    "/api/chat": ({"messages": HI, "model": "main"}, 1),
    "/inference/v1/generate": ({"token_ids": [1], "sampling_params": {"n": 2}}, 2),
}
"""A request of each API, and its number of choices."""


@pytest.mark.parametrize("how", ["close", "reset", "half close"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", LEFT)
def test_a_client_that_hangs_up_is_noticed_while_nothing_is_written(
    path: str, is_stream: bool, how: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    body, num_choices = LEFT[path]
    engine.is_paused = True  # a long prefill: nothing is written that could fail
    with connect(gateway.port) as client:
        send_post(client, path, {**body, "stream": is_stream})
        if is_stream:
            with client.makefile("rb") as file:
                assert read_head(file)[0] == 200
        engine.await_generates(num_choices)
        gateway.await_status("/livez", 200)  # it waits for the engine
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
        if how == "half close":
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        for generate in engine.generates:
            engine.await_abort(generate.request)


def test_a_client_that_pipelines_its_next_request_has_not_hung_up(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.is_paused = True
    with connect(gateway.port) as client, client.makefile("rb") as file:
        for _ in range(2):
            send_post(client, COMPLETIONS, text())
        engine.await_generates(1)
        gateway.await_status("/livez", 200)  # it has seen the second request
        engine.is_paused = False
        for _ in range(2):
            status, headers = read_head(file)
            assert status == 200
            file.read(int(headers["content-length"]))


def test_a_client_that_never_reads_is_cut_off_and_costs_bounded_memory(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    flood = ids_of("0123456789abcdef") * 4096
    engine.script = lambda generate: (
        text_reply("quick")
        if text_of(generate.prompt.tolist()) == "x"
        else TokenReply([flood] * 1000)
    )
    with connect(gateway.port, rcvbuf=4096) as client:
        send_post(client, COMPLETIONS, text(prompt="flood", stream=True, max_tokens=1 << 24))
        engine.await_generates(1)
        quick = gateway.post(COMPLETIONS, text())
        assert quick.status_code == 200, quick.text
        assert quick.json()["choices"][0]["text"] == "quick"
        engine.await_abort(engine.generates[0].request, timeout_s=20)


def test_a_slow_reader_gets_every_byte(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    """The answer exceeds the kernel's buffers, but not the gateway's, so the gateway keeps the rest
    until the client reads."""
    piece = ids_of("0123456789abcdef") * 2048
    engine.script = lambda generate: TokenReply([piece] * 20)
    with connect(gateway.port, rcvbuf=4096) as client, client.makefile("rb") as file:
        send_post(client, COMPLETIONS, text(stream=True, max_tokens=1 << 24))
        engine.await_generates(1)
        engine.await_idle()
        gateway.await_status("/livez", 200)  # it has got what the engine said
        assert read_head(file)[0] == 200
        said = 0
        while not (line := file.readline()).startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                said += len(json.loads(line[6:])["choices"][0]["text"])
    assert said == 20 * len(piece)


def test_an_engine_restart_fails_open_requests_and_serves_new_ones(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with (
        GatewayProcess(engine=address) as gateway,
        ScriptedEngine(address, is_paused=True) as engine,
        connect(gateway.await_ready().port) as client,
        client.makefile("rb") as file,
    ):
        wholes: list[Any] = []
        waiting = threading.Thread(
            target=lambda: wholes.append(exchange(gateway.port, CHAT, chat()))
        )
        waiting.start()
        send_post(client, CHAT, chat(stream=True))
        status, headers = read_head(file)  # the engine has accepted it
        engine.await_generates(2)
        engine.kill()
        with ScriptedEngine(address):
            waiting.join()
            streamed = read_body(file, headers)
            gateway.await_ready()
            assert gateway.post(CHAT, chat()).status_code == 200
    ((whole_status, whole_headers, whole),) = wholes
    assert (whole_status, whole_headers["retry-after"]) == (503, "1")
    assert json.loads(whole)["error"]["code"] == "engine_lost"
    assert status == 200
    error, done, _ = streamed.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_lost"
    assert done == b"data: [DONE]"


def test_an_engine_that_falls_silent_is_given_up_within_its_lease(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with ScriptedEngine(address) as engine, GatewayProcess(engine=address) as gateway:
        gateway.await_ready()
        engine.step_s = 0.02
        engine.script = lambda generate: text_reply("x" * 4000)
        with connect(gateway.port) as client, client.makefile("rb") as file:
            send_post(client, CHAT, chat(stream=True))
            assert read_head(file)[0] == 200
            for _ in range(8):
                file.readline()
            engine.is_silent = True
            rest = []
            while not (line := file.readline()).startswith(b"data: [DONE]"):
                rest.append(line)
        errors = [json.loads(line[6:]) for line in rest if line.startswith(b'data: {"error"')]
        assert [error["error"]["code"] for error in errors] == ["engine_lost"]
        refused = gateway.post(CHAT, chat(stream=True))
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert gateway.await_status("/readyz", 503).json()["why"]
        assert requests.get(gateway.url + "/livez", timeout=5).status_code == 200


UNPARSED = {
    "a method with blanks": (b"tell me my secret prompt\r\n\r\n", 400),
    "no line": (b"secret prompt\r\n\r\n", 400),
    "a header without a colon": (
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nAuthorization Bearer sk-secret\r\n\r\n",
        400,
    ),
    "a long line": (b"GET /?q=" + b"secret" * 2000 + b" HTTP/1.1\r\n\r\n", 414),
    "a long header": (
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"secret" * 3000 + b"\r\n\r\n",
        431,
    ),
    "many headers": (
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"X: secret\r\n" * 200 + b"\r\n",
        431,
    ),
    "a coding that nobody knows": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: secret\r\n\r\n",
        501,
    ),
}


def num_counted(gateway: GatewayProcess, status: int) -> float:
    return metric_of(gateway.url, f'tidegate_requests_total{{route="other",status="{status}"}}')


@pytest.mark.parametrize("case", UNPARSED)
def test_a_request_that_cannot_be_parsed_is_answered_logged_and_counted_without_its_words(
    gateway: GatewayProcess, case: str
) -> None:
    data, expected = UNPARSED[case]
    before = num_counted(gateway, expected)
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(data)
        status, headers = read_head(file)
        body = read_body(file, headers)
        assert file.read() == b""  # nothing follows: the connection is closed
    assert (status, headers["content-type"]) == (expected, "application/json")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert num_counted(gateway, expected) == before + 1
    line = f"- - {expected} id={headers['x-request-id']}"
    assert eventually(lambda: line in gateway.log)
    assert b"secret" not in body
    assert "secret" not in gateway.log


@pytest.mark.parametrize(
    "body",
    [b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}xx", b"2;=\r\n{}\r\n0\r\n\r\n"],
    ids=["size", "end", "extension"],
)
def test_a_malformed_chunked_body_is_the_clients_fault(
    gateway: GatewayProcess, body: bytes
) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + body
        )
        status, headers = read_head(file)
        result = json.loads(read_body(file, headers))
    assert (status, headers["connection"]) == (400, "close")
    assert "chunked" in result["error"]["message"]
    assert "Traceback" not in gateway.log


@pytest.mark.parametrize("body", [b"0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"], ids=["empty", "json"])
@pytest.mark.parametrize(
    ("coding", "name"),
    [
        ("gzip, chunked", "gzip"),
        ("GZIP,chunked", "gzip"),
        ("deflate, gzip, chunked", "deflate"),
        ("identity, chunked", "identity"),
        ("chunked, gzip", "gzip"),
        ("gzip", "gzip"),
        ("chunked\r\nTransfer-Encoding: gzip", "gzip"),
        ("chunked, br", "br"),
        ("secret, chunked", "this coding"),
    ],
)
def test_a_transfer_coding_that_is_not_chunked_is_refused_by_its_name(
    gateway: GatewayProcess, coding: str, name: str, body: bytes
) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: %b\r\n\r\n" % coding.encode() + body
        )
        status, headers = read_head(file)
        result = json.loads(read_body(file, headers))
        assert file.read() == b""  # the connection is closed
    assert (status, headers["connection"]) == (501, "close")
    assert result["error"]["message"].startswith(f"Transfer-Encoding: {name} is not supported; ")


@pytest.mark.parametrize("coding", [b"chunked", b" Chunked\t"])
def test_a_chunked_body_is_read(gateway: GatewayProcess, coding: bytes) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
            b'Transfer-Encoding:%b\r\n\r\n10\r\n{"prompt": "ab"}\r\n0\r\n\r\n' % coding
        )
        status, headers = read_head(file)
        assert (status, json.loads(read_body(file, headers))["count"]) == (200, 2)


def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(gateway: GatewayProcess) -> None:
    status, headers, result = exchange(
        gateway.port, COMPLETIONS, b"\x1f\x8b", headers={"Content-Encoding": "gzip"}
    )
    assert (status, headers["content-type"]) == (415, "application/json")
    assert "gzip" in json.loads(result)["error"]["message"]


def test_a_body_that_ends_before_its_length_is_refused_though_it_is_valid_json(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    body = json.dumps(text()).encode()
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (len(body) + 1) + body
        )
        client.shutdown(socket.SHUT_WR)
        status, headers = read_head(file)
        result = json.loads(read_body(file, headers))
    assert status == 400
    assert "shorter than its Content-Length" in result["error"]["message"]
    assert not engine.generates
