"""Lines of the log as JSON: one object each; of an exception no words, unless they are wanted."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from gateway import access_log
from gateway.log_lines import formatter
from gateway.record import Record

CANARY = "what somebody wrote"
RECORD = Record(
    request_id="r-1",
    method="POST",
    path="/v1/completions",
    route="/v1/completions",
    status=429,
    key="ci",
    end="refused",
    began_ns=12,
    took_s=0.0123456789,
    answer=None,
)


def a_line(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord(
        "gateway.x", logging.WARNING, "x", 1, message, arguments, more.get("exc_info")
    )


def as_json(record: logging.LogRecord, *, shows_content: bool = False) -> dict[str, Any]:
    text = formatter("json", shows_content=shows_content).format(record)
    assert "\n" not in text
    told: dict[str, Any] = json.loads(text)
    return told


def failed() -> logging.LogRecord:
    try:
        raise ValueError(CANARY)
    except ValueError:
        return a_line("it failed", exc_info=sys.exc_info())


def test_a_message_says_who_speaks_when_and_how_gravely() -> None:
    told = as_json(a_line('a "quoted" %s\nof two', "line"))
    assert told["message"] == 'a "quoted" line\nof two'
    assert (told["event"], told["level"]) == ("gateway.x", "WARNING")
    assert told["time"].endswith("Z")


@pytest.mark.parametrize("shows_content", [False, True])
def test_an_exception_is_told_with_its_words_only_where_they_are_wanted(
    shows_content: bool,
) -> None:
    told = as_json(failed(), shows_content=shows_content)
    assert "ValueError" in told["exception"]
    assert (CANARY in told["exception"]) == shows_content


def test_a_request_is_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gateway.access"):
        access_log.tell(RECORD)
    (line,) = caplog.records
    told = as_json(line)
    assert told["event"] == "request"
    assert {name: told[name] for name in ("request_id", "key", "end", "status", "took_s")} == {
        "request_id": "r-1",
        "key": "ci",
        "end": "refused",
        "status": 429,
        "took_s": 0.012346,
    }
    assert "finish" not in told
    text = formatter("text", shows_content=False).format(line)
    assert text.endswith("POST /v1/completions 429 id=r-1 key=ci ms=12.3")
