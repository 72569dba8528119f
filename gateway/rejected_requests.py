"""Responses to requests that gunicorn could not parse or rejected itself.

Such a request never reaches the application. Its response is the usual JSON error. The response
does not quote the request, because a bad request line may contain a prompt and a bad header may
contain a key. These requests are logged and counted like all others, but without method and path.
"""

from __future__ import annotations

import contextlib
import http
from collections.abc import Iterable
from typing import Any

from gunicorn.http import errors

from gateway.api.openai.responses import error_body
from gateway.context import REQUEST_ID_HEADER, RequestContext
from gateway.http.client_socket import linger
from gateway.http.errors import HTTPFault, internal_fault, plain_fault
from gateway.observe import access_log
from gateway.service import Service

_SEND_S = 5.0
"""Seconds after which sending the response is given up."""
_HEADER = "a header is malformed"
_CHUNKED = "the body's chunked transfer coding is malformed"
_FAULTS: dict[type[errors.ParseException], tuple[int, str]] = {
    errors.InvalidRequestLine: (400, "the request line is malformed"),
    errors.InvalidRequestMethod: (400, "the method is malformed"),
    errors.InvalidHTTPVersion: (400, "the HTTP version is not supported"),
    errors.ObsoleteFolding: (400, _HEADER),
    errors.InvalidHeader: (400, _HEADER),
    errors.InvalidHeaderName: (400, _HEADER),
    errors.InvalidChunkSize: (400, _CHUNKED),
    errors.ChunkMissingTerminator: (400, _CHUNKED),
    errors.InvalidChunkExtension: (400, _CHUNKED),
    errors.LimitRequestLine: (414, "the request line is too long"),
    errors.ExpectationFailed: (417, "the value of the Expect header is not supported"),
    errors.LimitRequestHeaders: (431, "there are too many headers, or they are too long"),
}
"""gunicorn's exception -> status and message."""
_CODINGS = ("gzip", "x-gzip", "deflate", "compress", "x-compress", "identity", "br", "zstd")
"""Transfer codings that an error may name. Other values are not quoted: they may be secrets."""


def check_transfer_coding(headers: Iterable[tuple[str, str]]) -> None:
    """Raise UnsupportedTransferCoding if `headers` name a transfer coding other than chunked.

    headers  (name in upper case, value) pairs, as gunicorn passes them
    """
    for name, value in headers:
        if name == "TRANSFER-ENCODING" and (coding := _not_chunked(value)) is not None:
            raise errors.UnsupportedTransferCoding(coding)


def _not_chunked(value: str) -> str | None:
    """Return the first coding in a Transfer-Encoding header that is not chunked, or None."""
    codings = (coding.strip(" \t") for coding in value.lower().split(","))
    return next((coding for coding in codings if coding != "chunked"), None)


def _unsupported_coding(error: BaseException) -> str | None:
    """Return the transfer coding that made parsing fail; None if it failed for another reason.

    If "chunked" does not follow a known coding, gunicorn raises InvalidHeader instead of
    UnsupportedTransferCoding. So the headers of the failed request are checked again.
    """
    try:
        if isinstance(error, errors.InvalidHeader) and error.req is not None:
            check_transfer_coding(error.req.headers)
    except errors.UnsupportedTransferCoding as found:
        error = found
    if isinstance(error, errors.UnsupportedTransferCoding):
        return _not_chunked(str(error.hdr)) or ""
    return None


def fault_of(error: BaseException) -> HTTPFault:
    """Return the response to `error`. Log the error unless the client caused it."""
    if (coding := _unsupported_coding(error)) is not None:
        name = coding if coding in _CODINGS else "this coding"
        return plain_fault(
            501,
            f"Transfer-Encoding: {name} is not supported; send the body as it is, with a "
            "Content-Length or with Transfer-Encoding: chunked",
        )
    if type(error) in _FAULTS:
        return plain_fault(*_FAULTS[type(error)])
    is_ours = isinstance(error, errors.InvalidResponseHeader | errors.InvalidResponseHeaderName)
    if isinstance(error, errors.ParseException) and not is_ours:
        return plain_fault(400, "the request is malformed")
    return internal_fault(error)


def answer(service: Service, sock: Any, error: BaseException) -> None:
    """Send the response to a failed request, log the request and count it.

    sock  the client's socket; the caller closes it afterwards
    """
    context = RequestContext(
        method="-",
        path="-",
        route="other",
        on_close=[
            service.metrics.count,
            *([access_log.log_request] if service.config.log_requests else ()),
        ],
    )
    fault = fault_of(error)
    body = error_body(fault)
    head = (
        f"HTTP/1.1 {fault.status} {http.HTTPStatus(fault.status).phrase}\r\n"
        f"{REQUEST_ID_HEADER}: {context.request_id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    context.close(fault.status)
    with contextlib.suppress(OSError):  # the client has disconnected
        sock.settimeout(_SEND_S)
        sock.sendall(head.encode() + body)
        linger(sock)
