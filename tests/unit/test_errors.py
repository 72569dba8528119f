"""The class of an error determines what the client receives and what is logged (law 17 of
docs/contribute/laws.md).

Tests over sockets check that a WireError is dropped and counted:
`tests/integration/test_mailbox.py` for the engine, `tests/integration/test_fuzz.py` for every
process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from gateway.http.errors import fault_of, internal_fault
from protocol.wire.errors import EngineError, RequestError, ServingError, StepFailed, WireError

TEXT = "the words of this error"
SHOWN_AS_ID = (EngineError, StepFailed, WireError)


def leaves(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    """Yield the errors that may reach a gateway: `kind` and the classes below it in
    protocol/wire/errors.py, except ServingError and RequestError. Errors of other packages end a
    process."""
    if kind not in (ServingError, RequestError):
        yield kind
    for each in kind.__subclasses__():
        if each.__module__ == ServingError.__module__:
            yield from leaves(each)


KINDS = list(leaves(ServingError))
REQUEST_ERRORS = [kind for kind in KINDS if issubclass(kind, RequestError)]
OWN_STATUS = [kind for kind in KINDS if issubclass(kind, EngineError) and kind not in SHOWN_AS_ID]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


def test_every_branch_of_the_tree_has_leaves() -> None:
    assert set(REQUEST_ERRORS) | set(OWN_STATUS) | set(SHOWN_AS_ID) == set(KINDS)
    assert len(REQUEST_ERRORS) >= 7
    assert len(OWN_STATUS) >= 4


@pytest.mark.parametrize("kind", REQUEST_ERRORS)
def test_a_request_error_is_shown_with_its_field_and_not_logged(
    kind: type[ServingError], log: pytest.LogCaptureFixture
) -> None:
    fault = fault_of(kind(TEXT, param="messages[2].content"))
    assert (fault.message, fault.param) == (TEXT, "messages[2].content")
    assert 400 <= fault.status < 500 or fault.status == 504
    assert log.records == []


@pytest.mark.parametrize("kind", OWN_STATUS)
def test_an_engine_error_with_a_status_of_its_own_is_shown_and_logged(
    kind: type[ServingError], log: pytest.LogCaptureFixture
) -> None:
    fault = fault_of(kind(TEXT))
    assert (fault.message, fault.code) == (TEXT, kind.code)
    assert fault.status in (501, 502, 503, 507)
    assert TEXT in log.text


@pytest.mark.parametrize("kind", SHOWN_AS_ID)
def test_any_other_engine_error_is_logged_and_shown_as_an_id(
    kind: type[ServingError], log: pytest.LogCaptureFixture
) -> None:
    fault = fault_of(kind(TEXT))
    assert fault.status == 500
    assert TEXT not in fault.message
    (error_id,) = re.findall(r"\berror id ([0-9a-f]{12})\b", fault.message)
    (record,) = log.records
    assert record.levelno == logging.ERROR
    assert error_id in record.getMessage()
    assert TEXT in record.getMessage()


def test_any_other_exception_is_logged_with_its_traceback_and_shown_as_an_id(
    log: pytest.LogCaptureFixture,
) -> None:
    try:
        raise RuntimeError(TEXT)
    except RuntimeError as error:
        fault = internal_fault(error)
    assert (fault.status, fault.code) == (500, "internal_error")
    assert TEXT not in fault.message
    (record,) = log.records
    assert record.exc_info is not None
