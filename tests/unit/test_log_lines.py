"""Log lines as text, in colour and as JSON, and which fields of requests they show."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import pytest

from gateway.generation.record import RequestRecord
from gateway.observe import access_log
from gateway.observe.logging import formatter
from protocol.process.log_lines import LineFormatter, LogStyle, without_style
from tools.terminal import Terminal, log_style

CANARY = "what somebody wrote"
RECORD = RequestRecord(
    request_id="r-1",
    method="POST",
    path="/v1/completions",
    route="/v1/completions",
    status=429,
    key="ci",
    end="refused",
    started_ns=12,
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
    fields: dict[str, Any] = json.loads(text)
    return fields


def failed() -> logging.LogRecord:
    try:
        raise ValueError(CANARY)
    except ValueError:
        return a_line("it failed", exc_info=sys.exc_info())


def test_a_json_line_has_message_event_level_and_time() -> None:
    fields = as_json(a_line('a "quoted" %s\nof two', "line"))
    assert fields["message"] == 'a "quoted" line\nof two'
    assert (fields["event"], fields["level"]) == ("gateway.x", "WARNING")
    assert fields["time"].endswith("Z")


@pytest.mark.parametrize("shows_content", [False, True])
def test_exception_messages_are_logged_only_if_content_is_shown(shows_content: bool) -> None:
    fields = as_json(failed(), shows_content=shows_content)
    assert "ValueError" in fields["exception"]
    assert (CANARY in fields["exception"]) == shows_content


def test_an_access_line_has_the_fields_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gateway.access"):
        access_log.log_request(RECORD)
    (line,) = caplog.records
    fields = as_json(line)
    assert fields["event"] == "request"
    assert {name: fields[name] for name in ("request_id", "key", "end", "status", "took_s")} == {
        "request_id": "r-1",
        "key": "ci",
        "end": "refused",
        "status": 429,
        "took_s": 0.012346,
    }
    assert "finish" not in fields
    text = formatter("text", shows_content=False).format(line)
    assert text.endswith("POST /v1/completions 429 id=r-1 key=ci ms=12.3")


TEXT = "00:00:12 engine[41] ERROR one\ntwo"
COLOR = "\x1b[2m00:00:12 engine[41]\x1b[0m \x1b[31mERROR\x1b[0m one\ntwo"
JSON = (
    '{"time":"1970-01-01T00:00:12.500Z","level":"ERROR","process":"engine[41]",'
    '"event":"engine_core.loop","message":"one\\ntwo"}'
)


@pytest.mark.parametrize(("style", "line"), [("text", TEXT), ("color", COLOR), ("json", JSON)])
def test_a_line_has_time_process_level_and_message(style: LogStyle, line: str) -> None:
    made = LineFormatter("engine", style)
    made.converter = time.gmtime
    facts = {"name": "engine_core.loop", "levelno": logging.ERROR, "levelname": "ERROR"}
    record = logging.makeLogRecord(
        {**facts, "msg": "one\n%s", "args": ("two",), "created": 12.5, "process": 41}
    )
    assert made.format(record) == line
    assert without_style(line) == ("ERROR one\ntwo" if style == "json" else TEXT)


class Screen:
    def __init__(self, *, is_terminal: bool) -> None:
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "log_format", "environment", "style"),
    [
        (True, "text", {}, "color"),
        (True, "text", {"NO_COLOR": "1"}, "text"),
        (True, "text", {"TERM": "dumb"}, "text"),
        (True, "json", {}, "json"),
        (False, None, {}, "text"),
        (False, "json", {}, "json"),
    ],
)
def test_only_text_on_a_terminal_has_colours(
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    log_format: str | None,
    environment: dict[str, str],
    style: LogStyle,
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Screen(is_terminal=is_terminal))
    found = log_style(log_format)
    monkeypatch.undo()  # pytest writes to the true ones
    assert found == style


def test_a_banner_is_one_json_line_and_a_failure_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal("json")
    terminal.show("\nTidegate serves m\n\n  curl ...\n")
    terminal.fail("no such model")
    shown = capsys.readouterr()
    assert json.loads(shown.out)["message"] == "Tidegate serves m"
    assert json.loads(shown.err)["message"] == "no such model"
    assert json.loads(shown.err)["level"] == "ERROR"
