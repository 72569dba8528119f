"""Sends raw HTTP, reads answers, metrics and streams, and folds streams into whole answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import requests

from tests.support.waiting import HANG_S


def connect(port: int, **options: int) -> socket.socket:
    """Connect to a local port.

    rcvbuf   size of the kernel's receive buffer
    """
    client = socket.socket()
    client.settimeout(HANG_S)
    if "rcvbuf" in options:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["rcvbuf"])
    try:
        client.connect(("127.0.0.1", port))
    except OSError:
        client.close()
        raise
    return client


def send_post(
    client: socket.socket,
    path: str,
    body: Any,
    *,
    version: str = "1.1",
    headers: dict[str, str] | None = None,
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in (fields | (headers or {})).items())
    client.sendall(f"POST {path} HTTP/{version}\r\n{lines}\r\n".encode() + data)


def read_head(file: Any) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, with names in lower case."""
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


def read_body(file: Any, headers: dict[str, str]) -> bytes:
    """Return the whole body, without chunk framing."""
    if headers.get("transfer-encoding") != "chunked":
        length = headers.get("content-length")
        data: bytes = file.read() if length is None else file.read(int(length))
        return data
    parts = []
    while size := int(file.readline(), 16):
        parts.append(file.read(size))
        assert file.readline() == b"\r\n"
    assert file.readline() == b"\r\n"
    return b"".join(parts)


def exchange(
    port: int,
    path: str,
    body: Any,
    *,
    on_head: Callable[[], object] = lambda: None,
    **options: Any,
) -> tuple[int, dict[str, str], bytes]:
    """Send one request over a new connection. Return (status, headers, body).

    on_head   called when the head has arrived. A gateway sends the head of a stream when all
              choices were accepted, with the first event or with the first keep-alive
    """
    with connect(port) as client, client.makefile("rb") as file:
        send_post(client, path, body, **options)
        status, headers = read_head(file)
        on_head()
        return status, headers, read_body(file, headers)


def response(status: str, body: bytes = b"", /, **headers: str) -> bytes:
    """Return the bytes of an HTTP response."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def json_of(response: requests.Response, status: int = 200) -> Any:
    """Return the JSON of a response. Raises AssertionError if it has another status."""
    assert response.status_code == status, response.text
    return response.json()


def error_of(response: requests.Response, status: int = 400) -> dict[str, Any]:
    """Return the `error` object of a response. Raises AssertionError if it has another status."""
    error: dict[str, Any] = json_of(response, status)["error"]
    return error


def metrics_of(url: str) -> dict[str, float]:
    """Return the value of each series in a server's `/metrics`, by its name and labels as written:
    `tidegate_requests_total{route="/livez",status="200"}`."""
    text = requests.get(f"{url}/metrics", timeout=HANG_S).text
    rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in rows}


def metric_of(url: str, name: str) -> float:
    """Return the value of one series, or the sum of all series with this name. A counter that was
    never incremented may not be exported: it is 0."""
    values = metrics_of(url).items()
    return sum(value for series, value in values if series == name or series.startswith(name + "{"))


def events_of(body: bytes) -> list[Any]:
    """Return the parsed events of a stream that ends with [DONE], without comments."""
    frames = body.split(b"\n\n")
    assert frames.pop() == b"", "a stream ends with an empty line"
    data = [frame.removeprefix(b"data: ") for frame in frames if not frame.startswith(b":")]
    assert data.pop() == b"[DONE]"
    return [json.loads(item) for item in data]


def fold_stream(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Return text, logprobs, token ids and finish of each choice of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for bit in event["choices"]:
            whole = choices.setdefault(
                bit["index"], {"text": "", "logprobs": None, "token_ids": [], "finish": None}
            )
            assert whole["finish"] is None, "a chunk after the end"
            whole["text"] += bit["delta"].get("content", "") if "delta" in bit else bit["text"]
            whole["logprobs"] = _joined(whole["logprobs"], bit["logprobs"])
            whole["token_ids"] += bit.get("token_ids", [])
            if bit["finish_reason"] is not None:
                whole["finish"] = (bit["finish_reason"], bit["stop_reason"])
    return choices


def _joined(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return left if right is None else right
    return {name: left[name] + right[name] if left[name] is not None else None for name in left}


def fold_response(response: Any) -> dict[int, dict[str, Any]]:
    """Return text, logprobs, token ids and finish of each choice of a whole answer."""
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "logprobs": choice["logprobs"],
            "token_ids": choice.get("token_ids", []),
            "finish": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in response["choices"]
    }


def fold_chat_stream(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Return content, reasoning, calls, finish and warnings of each choice of a chat stream.

    Checks that a call's id and name come before its arguments, and that no chunk follows the end.
    """
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for bit in event["choices"]:
            whole = choices.setdefault(bit["index"], _empty_choice())
            assert whole["finish"] is None, "a chunk after the end"
            _add_delta(whole, bit["delta"])
            whole["finish"] = bit["finish_reason"]
            if whole["finish"] is not None:
                whole["warnings"] = [w["code"] for w in event.get("warnings", [])]
    return choices


def _empty_choice() -> dict[str, Any]:
    return {"content": "", "reasoning": "", "calls": [], "finish": None, "warnings": []}


def _add_delta(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    whole["content"] += delta.get("content", "")
    whole["reasoning"] += delta.get("reasoning", "")
    assert delta.get("reasoning") == delta.get("reasoning_content")
    for call in delta.get("tool_calls", []):
        if "id" in call:
            assert call["index"] == len(whole["calls"])
            assert call["type"] == "function"
            assert call["function"]["arguments"] == ""
            whole["calls"].append((call["id"], call["function"]["name"], ""))
        else:
            call_id, name, arguments = whole["calls"][call["index"]]
            arguments += call["function"]["arguments"]
            whole["calls"][call["index"]] = (call_id, name, arguments)


def fold_chat_response(response: Any) -> dict[int, dict[str, Any]]:
    """Return content, reasoning, calls, finish and warnings of each choice of a chat answer."""
    warnings = response.get("warnings", [])
    return {
        choice["index"]: {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"]["reasoning"] or "",
            "calls": [
                (call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in choice["message"].get("tool_calls", [])
            ],
            "finish": choice["finish_reason"],
            "warnings": [w["code"] for w in warnings if w["choice"] == choice["index"]],
        }
        for choice in response["choices"]
    }
