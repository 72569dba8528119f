"""`tidegate fetch-kernels`: fetches a FlashAttention library for GPUs."""

from __future__ import annotations

import argparse
import platform

from tools.failure import Failure
from tools.libraries.catalogue import DEFAULT_LIBRARY, LIBRARIES, MACHINE
from tools.libraries.fetch import fetch_library
from tools.models.fetch import format_size, home
from tools.terminal import Terminal

_PACKAGE = next(iter(LIBRARIES.values()))
_LIST = "\n".join(
    f"  {entry.name:<5} {entry.description}; {format_size(entry.file_bytes)} on disk"
    for entry in LIBRARIES.values()
)

DESCRIPTION = f"""\
Fetch a FlashAttention library, verify it, and print where it is. Servers on a GPU that are started
afterwards use it (--attention auto). The library needs a build of torch for CUDA 13.

libraries:
{_LIST}

They are files of the package {_PACKAGE.package} {_PACKAGE.version} on the index with which pip is
configured. The package is not installed. Usually only the file is downloaded. FlashAttention has
the licence BSD-3-Clause, and vLLM, which builds the files, Apache-2.0.
"""

EXAMPLES = """\
examples:
  tidegate fetch-kernels              for H100 and H200 (compute capability 9.x)
  tidegate fetch-kernels fa2          for other GPUs of compute capability 8.0 or later
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "library",
        nargs="?",
        choices=[*LIBRARIES],
        default=DEFAULT_LIBRARY,
        metavar="LIBRARY",
        help=f"{' or '.join(LIBRARIES)} (default {DEFAULT_LIBRARY})",
    )


def run(options: argparse.Namespace) -> int:
    """Fetch the library and print its path. Raises Failure if it is not built for this processor,
    or if it cannot be downloaded."""
    entry = LIBRARIES[options.library]
    if platform.machine() != MACHINE:
        raise Failure(f"{entry.name} is only built for {MACHINE}, not for {platform.machine()}")
    print(fetch_library(entry, home(), Terminal().progress))
    return 0
