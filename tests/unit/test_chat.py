"""What the chat makes of a stream, and of one that breaks off."""

from __future__ import annotations

import pytest

from tools.failure import Failure
from tools.http.conversation import ChatAnswer, events
from tools.http.web import WebServer, local_url


def test_events_are_the_data_up_to_done_without_comments() -> None:
    lines = [
        b": alive\n",
        b"\n",
        b'data: {"a": 1}\r\n',
        b"\n",
        b"data:2\n",
        b"\n",
        b"data: [DONE]\n",
        b"\n",
        b"data: 3\n",
        b"\n",
    ]
    assert list(events(lines)) == ['{"a": 1}', "2"]


def test_a_stream_that_ends_without_done_is_not_taken_for_an_answer() -> None:
    stream = events([b"data: 1\n", b"\n"])
    assert next(stream) == "1"
    with pytest.raises(Failure, match="closed the stream without"):
        next(stream)


def test_speed_is_that_of_decoding_and_is_not_made_up() -> None:
    assert ChatAnswer(tokens=11, started_at=1.0, ended_at=3.0).tokens_per_s == 5.0
    assert ChatAnswer(tokens=1, started_at=1.0, ended_at=1.0).tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("gpu-1", "http://gpu-1:8000"),
    ],
)
def test_a_server_that_listens_everywhere_is_reached_at_home(host: str, url: str) -> None:
    assert local_url(host, 8000) == url


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(Failure, match="--url"):
        WebServer(url)
