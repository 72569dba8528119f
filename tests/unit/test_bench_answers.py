"""Answers are parsed alike however their bytes are cut, and every failure is reported."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from tools.bench.answers import AnswerReader, BadResponse, BenchAnswer, ResponsePart, ResponseReader
from tools.http.sse import EventReader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": None}]})


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


USAGE = event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 11,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)
DONE = b"data: [DONE]\n\n"
STREAM = b": keep-alive\n\n" + text("Hel") + text("") + text("lo\n") + USAGE + DONE


def chunked(body: bytes, *, trailer: bytes = b"") -> bytes:
    """Return a response with `body` in chunked transfer coding, in chunks of at most 50 bytes."""
    pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
    framed = b"".join(f"{len(p):x};x=1\r\n".encode() + p + b"\r\n" for p in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailer + b"\r\n"


def measured(body: bytes) -> bytes:
    return HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def unmeasured(body: bytes) -> bytes:
    return HEAD + b"\r\n" + body


def cuts(data: bytes) -> list[list[bytes]]:
    """Return `data` whole, cut into single bytes, and cut at random places."""
    source = random.Random(3)
    ways = [[data], [data[at : at + 1] for at in range(len(data))]]
    for _ in range(10):
        places = sorted(source.sample(range(1, len(data)), 12))
        ways.append([data[a:b] for a, b in itertools.pairwise([0, *places, len(data)])])
    return ways


def read(pieces: list[bytes], *, closes: bool = True) -> AnswerReader:
    """Return a reader that has received these pieces, one each second."""
    reader = AnswerReader(BenchAnswer(started=0.0, requested_tokens=7))
    for now, piece in enumerate(pieces, start=1):
        reader.push(piece, float(now))
    if closes:
        reader.finish(float(len(pieces) + 1))
    return reader


@pytest.mark.parametrize("frame", [chunked, measured, unmeasured])
def test_an_answer_is_the_same_for_any_cut(frame: Any) -> None:
    for pieces in cuts(frame(STREAM)):
        answer = read(pieces).answer
        assert (answer.error, answer.message) == ("", "")
        assert len(answer.times) == 2
        assert (answer.usage.prompt_tokens, answer.output_tokens) == (11, 7)
        assert answer.usage.prompt_tokens_details.cached_tokens == 4


def test_events_are_stamped_with_the_time_their_last_byte_came() -> None:
    first, second = text("a"), text("b")
    pieces = [HEAD + b"\r\n", first[:9], first[9:] + second[:5], second[5:], DONE]
    answer = read(pieces).answer
    assert list(answer.times) == [3.0, 4.0]
    assert answer.ended == 6.0
    assert answer.ttft_s == 3.0


def test_a_response_ends_where_its_headers_say() -> None:
    assert read([chunked(STREAM)], closes=False).is_done
    assert read([chunked(STREAM, trailer=b"X-Sum: 1\r\n")], closes=False).is_done
    assert read([measured(STREAM)], closes=False).is_done
    assert not read([unmeasured(STREAM)], closes=False).is_done


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", True),
    ],
)
def test_a_connection_is_used_again_only_where_the_server_keeps_it(
    head: bytes, keeps: bool
) -> None:
    response = ResponseReader()
    assert response.push(head + b"{}") == b"{}"
    assert (response.part, response.status, response.keeps_alive) == (ResponsePart.END, 200, keeps)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17),
    ],
)
def test_bytes_that_are_no_http_response_are_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseReader().push(data)


@pytest.mark.parametrize(
    ("piece", "brings"),
    [
        (delta(role="assistant", content=""), False),
        (delta(content="x"), True),
        (delta(reasoning_content="x"), True),
        (delta(reasoning="x"), True),
        (delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), True),
        (delta(), False),
        (text(""), False),
        (text(" "), True),
    ],
)
def test_the_first_token_is_the_first_delta_of_any_kind(piece: bytes, brings: bool) -> None:
    answer = read([measured(piece + DONE)]).answer
    assert len(answer.times) == brings


def test_tokens_are_counted_from_events_without_usage() -> None:
    answer = read([measured(text("a") + text("b") + text("c") + DONE)]).answer
    assert (answer.counted, answer.output_tokens) == ("chunks", 3)


def test_time_per_token_counts_the_tokens_after_the_first() -> None:
    answer = read([HEAD + b"\r\n", text("a"), text("b"), USAGE + DONE]).answer
    assert answer.tpot_s == pytest.approx(1.0 / 6)  # one second between the events, 7 tokens
    assert read([measured(text("a") + DONE)]).answer.tpot_s is None


REFUSAL = b'{"error": {"message": "temperature: too hot", "code": 400}}'


@pytest.mark.parametrize(
    ("data", "kind", "complaint"),
    [
        (unmeasured(text("a")), "broken stream", "without [DONE]"),
        (measured(text("a"))[:-4], "connection lost", "in the middle"),
        (chunked(STREAM)[:-3], "connection lost", "in the middle"),
        (b"HTTP/1.1 200", "connection lost", "in the middle"),
        (measured(DONE), "empty answer", "no event"),
        (measured(b"data: {\n\n" + DONE), "malformed event", "{"),
        (measured(event({"choices": 3}) + DONE), "malformed event", "choices"),
        (
            measured(text("a") + event({"error": {"message": "out of memory"}}) + DONE),
            "error in the stream",
            "out of memory",
        ),
        (
            b"HTTP/1.1 429 Too Many\r\nContent-Length: 59\r\n\r\n" + REFUSAL,
            "status 429",
            "temperature: too hot",
        ),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 7\r\n\r\n<html/>", "status 502", "<html/>"),
        (b'HTTP/1.1 400 Bad\r\nContent-Length: 13\r\n\r\n{"error":"x"}', "status 400", "x"),
    ],
)
def test_every_way_to_fail_has_a_kind_and_words(data: bytes, kind: str, complaint: str) -> None:
    answer = read([data]).answer
    assert answer.error == kind
    assert complaint in answer.message


def test_events_of_several_lines_and_with_other_fields_are_read() -> None:
    data = b"event: x\r\nid: 3\r\ndata: a\r\ndata:b\r\n\r\n: comment\n\n\ndata: c\n\n"
    for pieces in cuts(data):
        reader = EventReader()
        assert [found for piece in pieces for found in reader.push(piece)] == [b"a\nb", b"c"]
