"""A file on a web server, read through the HTTP client of huggingface_hub.

That client obeys the variables for proxies and certificates, and HF_HUB_OFFLINE. Only
`tools.models.hub` and `tools.models.url` import this module, and only when they download.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import httpx2
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.utils import get_session, hf_raise_for_status

from tools.models.download import Body, ConnectionLost

BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Status codes after which a request is repeated."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class HttpFile:
    """A file on a web server.

    headers   sent with every request. A redirect to another host does not get the token.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        # Without "identity", positions and sizes might be those of compressed content.
        self._headers = {**headers, "Accept-Encoding": "identity"}

    @contextlib.contextmanager
    def open(self, offset: int) -> Iterator[Body]:
        """Request the file from `offset` on.

        Raises ConnectionLost if a retry may help, and HfHubHTTPError if the server refuses.
        """
        wanted = {"Range": f"bytes={offset}-"} if offset else {}
        with self._response(wanted) as response:
            yield Body(_start(response), _pieces(response))

    def size(self) -> int | None:
        """Return the size that the server reports, in bytes; None if it reports none.

        Raises the exceptions of `open`.
        """
        with self._response({"Range": "bytes=0-0"}) as response:
            if found := _CONTENT_RANGE.match(response.headers.get("Content-Range", "")):
                return int(found[2]) if found[2] != "*" else None
            length = response.headers.get("Content-Length", "")
            return int(length) if length.isdigit() else None

    @contextlib.contextmanager
    def _response(self, extra: Mapping[str, str]) -> Iterator[httpx2.Response]:
        headers = {**self._headers, **extra}
        try:
            with get_session().stream(
                "GET", self._url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                if response.status_code in BUSY:
                    raise ConnectionLost(f"the server answers {response.status_code}")
                hf_raise_for_status(response)
                yield response
        except httpx2.TransportError as error:
            raise ConnectionLost(str(error) or type(error).__name__) from None


def _start(response: httpx2.Response) -> int:
    """Return the position in the file of the first byte of a response's body."""
    if response.status_code != 206:
        return 0
    found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if found is None:
        raise ConnectionLost("the server sends a part of the file without saying which")
    return int(found[1])


def _pieces(response: httpx2.Response) -> Iterator[bytes]:
    try:
        yield from response.iter_raw()
    except httpx2.TransportError as error:
        raise ConnectionLost(str(error) or type(error).__name__) from None
