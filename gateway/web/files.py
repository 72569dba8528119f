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
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
"""Suffix of a file -> its content type. Files with other suffixes are not sent."""
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
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
    gzipped: bytes
    #: Digest of `data`.
    digest: str

    @classmethod
    def from_path(cls, path: Path, content_type: str = "") -> StaticFile:
        """Read a file. Without `content_type`, it is that of the suffix in `CONTENT_TYPES`."""
        data = path.read_bytes()
        return cls(
            content_type=content_type or CONTENT_TYPES[path.suffix],
            data=data,
            gzipped=gzip.compress(data, mtime=0),
            digest=hashlib.sha256(data).hexdigest()[:16],
        )


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return all files by name. They are read on the first call, so a server whose page is never
    opened does not keep them."""
    paths = sorted(path for path in STATIC.iterdir() if path.suffix in CONTENT_TYPES)
    return {path.name: StaticFile.from_path(path) for path in paths}
