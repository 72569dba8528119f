"""A server that speaks the part of the Hugging Face Hub's API that a download uses.

It answers these requests, as the Hub does:

    GET   /api/models/OWNER/REPO/revision/REVISION?blobs=true    files, sizes, digests, licence
    HEAD  /OWNER/REPO/resolve/REVISION/PATH                      digest (ETag), commit, size
    GET   the same, with Range                                   content, after a redirect to
                                                                 /cdn/... if the file is large
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
PIECE_BYTES = 4096


@dataclass
class FakeRepo:
    """A repository of the fake Hub."""

    files: dict[str, bytes]
    licence: str = "apache-2.0"
    #: Whether only users with TOKEN may read its files.
    is_gated: bool = False
    #: How the paths of files in large-file storage end. These files have a SHA-256.
    large: tuple[str, ...] = (".safetensors", ".gguf", "tokenizer.json")
    #: Architecture of its GGUF files; "": the Hub reports none.
    architecture: str = ""
    #: Path -> the wrong digest that the Hub reports.
    forged: dict[str, str] = field(default_factory=dict)
    #: Path -> the wrong size that the Hub reports.
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def is_large(self, path: str) -> bool:
        return path.endswith(self.large)

    def digest(self, path: str) -> str:
        content = self.files[path]
        if path in self.forged:
            return self.forged[path]
        if self.is_large(path):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def size(self, path: str) -> int:
        return self.sizes.get(path, len(self.files[path]))

    def describe(self, repo: str) -> dict[str, Any]:
        return {
            "_id": "0",
            "id": repo,
            "modelId": repo,
            "sha": self.commit,
            "private": False,
            "gated": "manual" if self.is_gated else False,
            "tags": ["safetensors", f"license:{self.licence}"],
            "cardData": {"license": self.licence},
            **({"gguf": {"architecture": self.architecture}} if self.architecture else {}),
            "siblings": [self._sibling(path) for path in self.files],
        }

    def _sibling(self, path: str) -> dict[str, Any]:
        size = self.size(path)
        sibling = {"rfilename": path, "size": size, "blobId": self.digest(path)[:40]}
        if self.is_large(path):
            lfs = {"sha256": self.digest(path), "size": size, "pointerSize": 134}
            sibling["lfs"] = lfs
        return sibling


class FakeHub:
    """The server. It runs in a thread inside the `with` block."""

    def __init__(self, **repos: FakeRepo) -> None:
        #: "owner/name" -> repository.
        self.repos: dict[str, FakeRepo] = dict(repos)
        #: Method, path and Range header of each request, in order.
        self.requests: list[tuple[str, str, str]] = []
        #: Path -> the Authorization header of its last request; "": it had none.
        self.authorizations: dict[str, str] = {}
        #: Bytes of content after which the next responses are cut off, one item per response.
        self.cuts: list[int] = []
        #: Bytes of content after which a response stops, while its connection stays open.
        self.stalls_after: int | None = None
        #: Whether the server ignores Range headers.
        self.ignores_ranges = False
        #: How many of the next requests for content get status 503, as from a busy server.
        self.busy = 0
        #: Path -> the ETag of a large file, if it is not the file's digest.
        self.etags: dict[str, str] = {}
        #: Whether every token is refused.
        self.refuses_tokens = False
        #: The server that large files are redirected to; "": this one.
        self.cdn = ""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def downloads(self, suffix: str = "") -> list[str]:
        """Return the paths of the requests for content that end in `suffix`."""
        return [
            path
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path and path.endswith(suffix)
        ]

    def ranges(self, suffix: str) -> list[str]:
        """Return the Range headers of the requests for large files whose paths end in `suffix`; ""
        for a request without the header."""
        return [
            wanted
            for method, path, wanted in self.requests
            if method == "GET" and "/cdn/" in path and path.endswith(suffix)
        ]

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        wanted = request.headers.get("Range", "")
        self.requests.append((request.command, path, wanted))
        self.authorizations[path] = request.headers.get("Authorization", "")
        if self.refuses_tokens and self.authorizations[path]:
            message = "Invalid credentials in Authorization header"
            _send(request, 401, {"X-Error-Message": message}, b"{}", with_body)
            return
        if found := _API.fullmatch(path):
            self._answer_api(request, found[1], found[2] or "main")
        elif path.startswith("/cdn/") and (found := _RESOLVE.fullmatch(path[4:])):
            self._send_content(request, found[1], found[3], with_body)
        elif found := _RESOLVE.fullmatch(path):
            self._answer_resolve(request, found, with_body)
        else:
            _send(request, 404, {}, b"not found", with_body)

    def _answer_api(self, request: BaseHTTPRequestHandler, repo: str, revision: str) -> None:
        found = self.repos.get(repo)
        if found is None:
            refuse(request, 401, "RepoNotFound")
        elif revision not in ("main", found.commit):
            refuse(request, 404, "RevisionNotFound")
        else:
            body = json.dumps(found.describe(repo)).encode()
            _send(request, 200, {"Content-Type": "application/json"}, body, with_body=True)

    def _answer_resolve(
        self, request: BaseHTTPRequestHandler, found: re.Match[str], with_body: bool
    ) -> None:
        repo, path = self.repos.get(found[1]), found[3]
        if repo is None:
            refuse(request, 401, "RepoNotFound")
        elif repo.is_gated and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            refuse(request, 403, "GatedRepo")
        elif path not in repo.files:
            refuse(request, 404, "EntryNotFound")
        elif repo.is_large(path):
            headers = {
                "Location": f"{self.cdn or self.url}/cdn{request.path}",
                "X-Repo-Commit": repo.commit,
                "X-Linked-Etag": f'"{self.etags.get(path, repo.digest(path))}"',
                "X-Linked-Size": str(repo.size(path)),
            }
            _send(request, 302, headers, b"", with_body)
        else:
            self._send_content(request, found[1], path, with_body)

    def _send_content(
        self, request: BaseHTTPRequestHandler, name: str, path: str, with_body: bool
    ) -> None:
        if self.busy and with_body:
            self.busy -= 1
            _send(request, 503, {}, b"busy", with_body)
            return
        repo = self.repos[name]
        content, start, end = repo.files[path], 0, len(repo.files[path])
        headers = {
            "ETag": f'"{repo.digest(path)}"',
            "X-Repo-Commit": repo.commit,
            "Accept-Ranges": "bytes",
        }
        wanted = _RANGE.fullmatch(request.headers.get("Range", ""))
        if wanted and not self.ignores_ranges:
            start = int(wanted[1])
            end = min(int(wanted[2]) + 1, end) if wanted[2] else end
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        status = 206 if "Content-Range" in headers else 200
        cut = self.cuts.pop(0) if self.cuts and with_body else None
        if self.stalls_after is not None:
            cut = self.stalls_after
        _send(request, status, headers, content[start:end], with_body, cut)
        if self.stalls_after is not None and with_body:
            self._stopped.wait()


def refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    headers = {"X-Error-Code": code, "X-Error-Message": f"refused: {code}"}
    _send(request, status, headers, b"{}", with_body=request.command != "HEAD")


def gguf_start(architecture: str, key: str = "general.architecture") -> bytes:
    """Return the header of a GGUF file whose only entry is the architecture, or another text."""
    name, value = (
        struct.pack("<Q", len(text)) + text for text in (key.encode(), architecture.encode())
    )
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + name + struct.pack("<I", 8) + value


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str],
    body: bytes,
    with_body: bool,
    cut: int | None = None,
) -> None:
    """Send a response. If `cut` is given, close the connection after `cut` bytes of the body."""
    request.send_response(status)
    for key, value in headers.items():
        request.send_header(key, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if not with_body:
        return
    sent = body if cut is None else body[:cut]
    for at in range(0, len(sent), PIECE_BYTES):
        request.wfile.write(sent[at : at + PIECE_BYTES])
    if cut is not None:
        request.wfile.flush()
        request.close_connection = True
