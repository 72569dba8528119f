"""The log of an exception has its frames and its type, but not its message."""

from __future__ import annotations

import io
import logging
import os

import pytest
from jinja2 import TemplateNotFound

from gateway.http.errors import internal_fault
from gateway.observe.logging import RedactingFormatter
from tools.processes.children import last_error_line

CANARY = "what somebody wrote"


def fails() -> None:
    try:
        int(CANARY)
    except ValueError as error:
        raise KeyError(CANARY) from error


def logged(kind: type[logging.Formatter]) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(kind("%(levelname)s %(message)s"))
    log = logging.getLogger("gateway.http.errors")
    log.addHandler(handler)
    try:
        fails()
    except KeyError as error:
        fault = internal_fault(error)
        assert CANARY not in fault.message
    finally:
        log.removeHandler(handler)
    return stream.getvalue()


def test_a_discreet_log_has_frames_and_kinds_and_no_words():
    text = logged(RedactingFormatter)
    assert CANARY not in text
    assert "in fails" in text
    assert text.index("builtins.ValueError") < text.index("builtins.KeyError")
    assert "--log-content" in text


def test_with_log_content_it_has_the_words():
    assert CANARY in logged(logging.Formatter)


def redacted(error: BaseException) -> str:
    record = logging.LogRecord("x", logging.ERROR, "x", 1, "oh", (), (type(error), error, None))
    return RedactingFormatter("%(message)s").format(record)


@pytest.mark.parametrize(
    ("path", "kind"), [("/no/such/file", FileNotFoundError), ("/", IsADirectoryError)]
)
def test_the_message_of_a_failed_system_call_is_kept(path: str, kind: type[OSError]) -> None:
    with pytest.raises(kind) as failed:
        os.open(path, os.O_WRONLY)
    last = redacted(failed.value).splitlines()[-1]
    assert last == f"builtins.{kind.__name__}: {failed.value.strerror}: {path!r}"
    assert last_error_line(["ERROR in main loop", "Traceback:", last]) == last


@pytest.mark.parametrize("error", [OSError(CANARY), TemplateNotFound(CANARY), OSError(5, CANARY)])
def test_an_oserror_that_is_not_of_the_system_is_redacted(error: OSError) -> None:
    assert CANARY not in redacted(error)


@pytest.mark.parametrize("kind", [RuntimeError, RecursionError, UnicodeDecodeError])
def test_messages_of_exceptions_are_redacted(kind: type[BaseException]):
    made = kind("utf-8", b"x", 0, 1, CANARY) if kind is UnicodeDecodeError else kind(CANARY)
    assert CANARY not in redacted(made)
