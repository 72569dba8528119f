"""A package index with fake builds of torch, in a folder: pages for pip, wheels, their metadata.

A wheel that nobody may download is a file of zeros with the declared size, which takes no room on
the disk. pip reads its metadata from the file beside it, as on PyPI.
"""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TORCH = "torch"
CPU_VERSION, CUDA_VERSION = "2.13.0+cpu", "2.13.0"
NVIDIA_BYTES = {"nvidia-cublas": 1_000_000_000, "nvidia-cudnn-cu13": 700_000_000}
"""The packages that the build for CUDA requires, and their sizes."""
CUDA_BYTES, CPU_BYTES = 500_000_000, 190_000_000
OUTDATED_VERSION = "2.5.0+cpu"
"""The version of a build for CPUs that our requirement does not allow."""


def add_wheel(
    index: Path, name: str, version: str, requires: Sequence[str] = (), size: int | None = None
) -> None:
    """Add a wheel to an index.

    requires   the requirements of the package
    size       its size in bytes, if nobody may download it; None: a small wheel that can be
               installed
    """
    stem = f"{name.replace('-', '_')}-{version}"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    metadata = "".join([*lines, *(f"Requires-Dist: {each}\n" for each in requires)])
    page = index / "simple" / name
    page.mkdir(parents=True, exist_ok=True)
    wheel = page / f"{stem}-py3-none-any.whl"
    if size is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{stem}.dist-info/METADATA", metadata)
            archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{stem}.dist-info/RECORD", "")
    else:
        with wheel.open("wb") as file:
            file.truncate(size)
    wheel.with_name(f"{wheel.name}.metadata").write_text(metadata)
    digest = f'"sha256={hashlib.sha256(metadata.encode()).hexdigest()}"'
    both_names = f"data-core-metadata={digest} data-dist-info-metadata={digest}"
    with (page / "index.html").open("a") as links:
        links.write(f'<a href="{wheel.name}" {both_names}>{wheel.name}</a>\n')


def write_cuda_index(folder: Path) -> None:
    """Write an index that has, like PyPI, only the build for CUDA."""
    for name, size in NVIDIA_BYTES.items():
        add_wheel(folder, name, "13.0", size=size)
    add_wheel(folder, TORCH, CUDA_VERSION, list(NVIDIA_BYTES), CUDA_BYTES)


class _IndexFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve the files of a folder. Yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_IndexFiles, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
