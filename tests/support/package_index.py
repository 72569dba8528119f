"""A package index with one wheel, on a local HTTP server.

GET  /simple/PACKAGE/          the page that pip reads
GET  /files/WHEEL              the wheel, or a part of it
GET  /files/WHEEL.metadata     its metadata, so that pip does not need the wheel
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

PACKAGE, VERSION = "tide-kernels", "1.0"
MEMBER = "tide_kernels/_tide_C.abi3.so"
METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


def wheel_with(content: bytes, *, before: bytes = b"") -> bytes:
    """Return a wheel with the file MEMBER, and another file before it."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tide_kernels/other.bin", before)
        archive.writestr(MEMBER, content)
        info = "tide_kernels-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel.getvalue()


@dataclass
class PackageIndex:
    """The index, and what its server does."""

    wheel: bytes
    has_ranges: bool = True
    #: Digest that the page states; None: the right one.
    sha256: str | None = None
    #: Number of responses with content that end in the middle.
    num_cut: int = 0
    #: Number of responses that are errors.
    num_errors: int = 0
    #: Whether the server says that parts belong to a larger file.
    is_other_size: bool = False
    #: Bytes of the wheel that were sent.
    num_sent: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    name: ClassVar[str] = "tide_kernels-1.0-py3-none-any.whl"

    @property
    def wheel_url(self) -> str:
        return f"{self.url}/files/{self.name}"

    def page(self) -> bytes:
        digest = self.sha256 or hashlib.sha256(self.wheel).hexdigest()
        metadata = hashlib.sha256(METADATA.encode()).hexdigest()
        link = (
            f'<a href="/files/{self.name}#sha256={digest}" data-core-metadata="sha256={metadata}"'
        )
        return f"<!DOCTYPE html><html><body>{link}>{self.name}</a></body></html>".encode()

    def takes(self, counter: str) -> bool:
        """Count down `num_cut` or `num_errors`. Return whether it was positive."""
        with self.lock:
            left = getattr(self, counter)
            setattr(self, counter, max(0, left - 1))
        return bool(left)

    @contextmanager
    def serve(self) -> Iterator[PackageIndex]:
        index = self

        class IndexHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _answer(self, index)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), IndexHandler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _answer(request: BaseHTTPRequestHandler, index: PackageIndex) -> None:
    if request.path == f"/simple/{PACKAGE}/":
        _send(request, 200, index.page(), {"Content-Type": "text/html"})
    elif request.path == f"/files/{index.name}.metadata":
        _send(request, 200, METADATA.encode(), {})
    elif request.path == f"/files/{index.name}":
        _send_wheel(request, index)
    else:
        _send(request, 404, b"", {})


def _send_wheel(request: BaseHTTPRequestHandler, index: PackageIndex) -> None:
    found = _RANGE.fullmatch(request.headers.get("Range", ""))
    content, status, headers = index.wheel, 200, {}
    if found is not None and index.has_ranges:
        start, stop = int(found[1]), int(found[2]) + 1
        content, status = content[start:stop], 206
        total = len(index.wheel) + index.is_other_size
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{total}"}
    if len(content) > 1 and index.takes("num_errors"):
        _send(request, 503, b"", {})
        return
    cut = len(content) // 2 if len(content) > 1 and index.takes("num_cut") else len(content)
    index.num_sent += cut
    _send(request, status, content, headers, cut)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str],
    cut: int | None = None,
) -> None:
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content[:cut])
