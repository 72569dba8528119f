"""Requests that cannot be parsed are answered with the status of their error. Neither the answer
nor the log quotes their text."""

from __future__ import annotations

import logging

import pytest
from gunicorn.http import errors

from gateway.observe.logging import RedactingFormatter
from gateway.rejected_requests import fault_of

SECRET = "sk-secret"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequestLine(SECRET), 400),
        (errors.InvalidRequestMethod(SECRET), 400),
        (errors.InvalidHTTPVersion(SECRET), 400),
        (errors.InvalidHeader(SECRET), 400),
        (errors.InvalidHeaderName(SECRET), 400),
        (errors.ObsoleteFolding(SECRET), 400),
        (errors.InvalidChunkSize(SECRET.encode()), 400),
        (errors.InvalidProxyLine(SECRET), 400),
        (errors.LimitRequestLine(5000, 4094), 414),
        (errors.ExpectationFailed(SECRET), 417),
        (errors.LimitRequestHeaders(SECRET), 431),
        (errors.UnsupportedTransferCoding(SECRET), 501),
        (errors.InvalidResponseHeader(SECRET), 500),
        (RuntimeError(SECRET), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_unparsed_body_is_neither_echoed_nor_logged(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    fault = fault_of(error)
    assert fault.status == status
    assert SECRET not in fault.message
    assert bool(caplog.records) == (status == 500)
    for record in caplog.records:
        record.exc_text = None  # as pytest's own handler has formatted it
        assert SECRET not in RedactingFormatter("%(message)s").format(record)
    assert all(record.levelno == logging.ERROR for record in caplog.records)
