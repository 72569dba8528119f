"""The files of the web page, read once, with their content types and entity tags."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
PAGE = "index.html"
"""The one HTML file. Its script shows the part that the address names."""
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
"""Suffix of a file -> its content type. Files with other suffixes are not sent."""
COMPRESSED = {".png", ".woff2"}
"""Suffixes of files that gzip would not make smaller."""
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Browsers ask each time whether a file has changed. Otherwise, after an upgrade, they might
    # combine files of two versions.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
"""Headers of every file."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is sent."""

    content_type: str
    data: bytes
    #: None: the data is compressed already.
    gzipped: bytes | None
    #: Digest of `data`.
    digest: str

    @classmethod
    def from_path(cls, path: Path) -> StaticFile:
        data = path.read_bytes()
        return cls(
            content_type=CONTENT_TYPES[path.suffix],
            data=data,
            gzipped=None if path.suffix in COMPRESSED else gzip.compress(data, mtime=0),
            digest=hashlib.sha256(data).hexdigest()[:16],
        )


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return all files by their path below `static/`. They are read on the first call, so a server
    whose page is never opened does not keep them."""
    paths = sorted(path for path in STATIC.rglob("*") if path.suffix in CONTENT_TYPES)
    return {path.relative_to(STATIC).as_posix(): StaticFile.from_path(path) for path in paths}
