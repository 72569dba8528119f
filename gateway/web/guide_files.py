"""The files of the guide at `/docs`, which `docs/site/build.py` makes from the pages of docs/.

An installation has no guide if Sphinx was not there when it was built. `make docs` builds it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from gateway.web.files import CONTENT_TYPES, HEADERS, StaticFile

GUIDE = Path(__file__).parent / "guide"
INDEX = "index.html"
POLICY = "policy.json"
"""File with the digests of the scripts and styles inside the pages. It is not sent."""


@cache
def guide_headers() -> dict[str, str]:
    """Return the headers of every file. Besides files of this server, the pages may run the scripts
    and use the styles whose digests were taken when the guide was built, and no others."""
    digests = json.loads((GUIDE / POLICY).read_text())
    rules = (
        "default-src 'none'",
        " ".join(("script-src 'self'", *digests["script"])),
        " ".join(("style-src 'self'", *digests["style"])),
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'self'",  # the search
        "frame-ancestors 'none'",
    )
    return HEADERS | {"Content-Security-Policy": "; ".join(rules)}


@cache
def _names() -> frozenset[str]:
    """Return the names of all files, such as "use/page.html"."""
    paths = (path for path in GUIDE.rglob("*") if path.suffix in CONTENT_TYPES)
    return frozenset(path.relative_to(GUIDE).as_posix() for path in paths)


def has_guide() -> bool:
    """Return whether this installation has the guide."""
    return INDEX in _names()


def guide_file(name: str) -> StaticFile | None:
    """Return a file of the guide; None if it has no such file.

    name    path in the guide, such as "use/page.html"; "" is its first page
    """
    name = name or INDEX
    return _read(name) if name in _names() else None


@cache
def _read(name: str) -> StaticFile:
    return StaticFile.from_path(GUIDE / name)
