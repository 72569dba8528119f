"""The time limits of a request: its own fields, its client's timeout, the operator's defaults."""

from __future__ import annotations

import pytest

from gateway.generation.job import RequestOptions
from gateway.generation.time_limits import TimeLimits, client_timeout_s
from protocol.config.gateway import GatewayConfig

READ, ANY = "X-Stainless-Read-Timeout", "X-Stainless-Timeout"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0),
        ({READ: "600"}, 600.0),
        ({READ: "2.5", ANY: "600"}, 2.5),
        ({ANY: "30.0"}, 30.0),
        ({READ: "7", ANY: "NOT_GIVEN"}, 7.0),
        ({READ: "None", ANY: "8"}, 8.0),
        *[({READ: odd}, 0.0) for odd in ("nan", "inf", "-1", "0", "1e99", "soon", "9" * 400)],
    ],
)
def test_the_clients_timeout_is_read_from_its_headers(
    headers: dict[str, str], seconds: float
) -> None:
    assert client_timeout_s(headers) == seconds


@pytest.mark.parametrize(
    ("own", "operator", "client", "expected"),
    [
        (None, 0.0, "", 0.0),
        (None, 60.0, "", 60.0),
        (5.0, 60.0, "", 5.0),
        (90.0, 60.0, "", 90.0),
        (None, 60.0, "30", 30.0),
        (90.0, 60.0, "30", 30.0),
        (5.0, 0.0, "30", 5.0),
        (None, 0.0, "30", 30.0),
    ],
)
def test_a_requests_timeout_overrides_the_operators_and_the_clients_limits_both(
    own: float | None, operator: float, client: str, expected: float
) -> None:
    config = GatewayConfig(timeout_s=operator, queue_timeout_s=2.0)
    found = TimeLimits.from_request(RequestOptions(timeout_s=own), config, {READ: client})
    assert found == TimeLimits(expected, 2.0, config.load_timeout_s)
    options = RequestOptions(timeout_s=own, queue_timeout_s=3.0)
    assert TimeLimits.from_request(options, config, {READ: client}).queue_timeout_s == 3.0


def test_a_timeout_header_does_not_count_for_a_stream() -> None:
    limits = TimeLimits.from_request(RequestOptions(), GatewayConfig())
    assert (limits.timeout_s, limits.queue_timeout_s) == (0.0, 0.0)
