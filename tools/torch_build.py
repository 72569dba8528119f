"""`python -m tools.torch_build`: installs torch, as the build that this machine can use.

PyPI's torch for Linux is built for CUDA. With NVIDIA's libraries it is a download of gigabytes,
which is useless without NVIDIA's driver. The Makefile runs this command in a new virtual
environment, before pip installs Tidegate and finds torch there. So this module imports only what
needs no other library. pip makes all requests, because its index, proxy and certificates are those
of this user. uv is used instead if it is installed and pip has no index of its own.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.failure import Failure
from tools.sizes import format_size

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of torch's own builds for CPUs."""
CPU_LABEL = "+cpu"
"""End of the version of a build for CPUs."""
DRIVER = "libcuda.so.1"
"""NVIDIA's driver, as `worker.device.cuda_driver` loads it."""
NVIDIA = ("nvidia-", "cuda-")
"""Starts of the names of the packages that only a build for CUDA requires."""
ASK_ONCE = ("--retries", "0", "--timeout", "10")
"""Options of pip for an index that this machine may not reach."""
READ_METADATA = ("--use-feature", "fast-deps")
"""Option of pip that reads only the metadata in a package, if the index does not list it itself.
Without the option, even a dry run would download all packages of such an index."""
SIZE_TIMEOUT_S = 10.0
NUM_REQUESTS = 8
"""Number of sizes that are requested at once."""
OWN_INDEX = ("index-url", "find-links", "no-index")
"""Ends of the names of pip's settings that select packages. uv does not read them."""


@dataclass(frozen=True, slots=True)
class PlannedPackage:
    """A package that pip would install.

    size   bytes to download; None if its server does not say
    """

    name: str
    version: str
    size: int | None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.torch_build", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--cpu-index", metavar="URL", default=CPU_INDEX)
    parser.add_argument("--dry-run", action="store_true", help="only print what is downloaded")
    options = parser.parse_args(words)
    has_driver = options.device == "gpu" or (options.device == "auto" and find_driver())
    try:
        requirement = torch_requirement(Path("setup.py"))
        install(requirement, has_driver, options.cpu_index, is_dry=options.dry_run)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def torch_requirement(setup: Path) -> str:
    """Return the requirement of torch that setup.py declares, such as "torch>=2.11,<2.14"."""
    names = {
        node.value
        for node in ast.walk(ast.parse(setup.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and str(node.value).startswith("torch>")
    }
    (requirement,) = names
    return str(requirement)


def find_driver(library: str = DRIVER) -> bool:
    """Return whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def install(requirement: str, has_driver: bool, cpu_index: str, *, is_dry: bool) -> None:
    """Install torch, unless a suitable version is installed. Print before what is downloaded.

    has_driver   whether to install what the index of pip has, which on PyPI is the build for CUDA
    cpu_index    URL of an index of builds for CPUs, used if the indexes of pip have none
    is_dry       whether to print only what pip would download

    Raises Failure if pip cannot install it.
    """
    if _is_installed() and not plan(requirement):
        return
    if not is_dry and cpu_index == CPU_INDEX and _install_with_uv(requirement, has_driver):
        return
    options, downloads = choose_index(requirement, () if has_driver else (cpu_index,))
    for line in describe(downloads, has_driver, cpu_index):
        _say(line)
    command = ("install", "--progress-bar", "on", "--no-compile", *options, requirement)
    if not is_dry and _pip(*command).returncode:
        raise Failure(f"pip could not install {requirement}; its message is above")


def choose_index(
    requirement: str, cpu_indexes: Sequence[str]
) -> tuple[Sequence[str], list[PlannedPackage]]:
    """Return options of pip, and what it then downloads: a build for CPUs if there are
    `cpu_indexes` and one index has such a build.

    cpu_indexes   URLs of indexes to add if those of pip have no build for CPUs

    Raises Failure if pip finds no torch.
    """
    choices = [(), *(("--extra-index-url", url, *ASK_ONCE) for url in cpu_indexes)]
    for options in choices if cpu_indexes else ():
        # A list of versions is one small page. A plan reads the metadata of thirty packages.
        if CPU_LABEL in _answer_of_pip("index", "versions", "torch", *options):
            downloads = plan(requirement, options)
            if not needs_nvidia(downloads):
                return options, downloads
    return (), plan(requirement)


def plan(requirement: str, options: Sequence[str] = ()) -> list[PlannedPackage]:
    """Return what pip would download for a requirement with these options; [] if it is installed.
    Raises Failure if pip finds no such package."""
    dry_run = ("install", "--dry-run", *READ_METADATA, "--report", "-", *options, requirement)
    done = _pip("-qq", *dry_run, stdout=subprocess.PIPE)
    if done.returncode:
        raise Failure(f"pip cannot install {requirement}; its message is above")
    found: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        sizes = threads.map(_size_of, [each["download_info"]["url"] for each in found])
        return [
            PlannedPackage(each["metadata"]["name"].lower(), each["metadata"]["version"], size)
            for each, size in zip(found, sizes, strict=True)
        ]


def needs_nvidia(downloads: Sequence[PlannedPackage]) -> bool:
    """Return whether the downloads include a library of CUDA."""
    return any(each.name.startswith(NVIDIA) for each in downloads)


def describe(downloads: Sequence[PlannedPackage], has_driver: bool, cpu_index: str) -> list[str]:
    """Return lines that say what pip is about to download, and how to change that.

    downloads    torch and what it requires
    has_driver   whether the build for CUDA is wanted
    cpu_index    URL of the index of builds for CPUs
    """
    versions = {each.name: each.version for each in downloads}
    torch = f"torch {versions['torch']}" if "torch" in versions else "the libraries of torch"
    what = f"{len(downloads)} package{'s' * (len(downloads) != 1)}, {_total(downloads)}"
    if needs_nvidia(downloads):
        if has_driver:
            return [f"Downloading {torch} for CUDA: {what}"]
        return [
            f"No build of torch for CPUs was found, neither in the index of pip nor in {cpu_index}",
            f"Downloading {torch} with libraries of NVIDIA, which a CPU does not need: {what}",
            "Ctrl-C stops this. To name another index of builds for CPUs: "
            "make serve TORCH_CPU_INDEX=URL",
        ]
    lines = [f"Downloading {torch} for CPUs: {what}"]
    if has_driver:
        lines.append("GPUs cannot be used with it: an index of pip has a build for CPUs")
    return lines


def _total(downloads: Sequence[PlannedPackage]) -> str:
    """Return the size of all downloads as text."""
    known = [each.size for each in downloads if each.size is not None]
    if not known:
        return "of unknown size"
    at_least = "" if len(known) == len(downloads) else "at least "
    return at_least + format_size(sum(known))


def _size_of(url: str) -> int | None:
    """Return the size of a file in bytes; None if its server does not say."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=SIZE_TIMEOUT_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None


def _is_installed() -> bool:
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return True


def _install_with_uv(requirement: str, has_driver: bool) -> bool:
    """Return whether uv has installed torch. It is not tried if pip has an index of its own."""
    uv = shutil.which("uv")
    settings = _answer_of_pip("config", "list").splitlines()
    names = [line.partition("=")[0] for line in settings]
    if uv is None or any(name.endswith(OWN_INDEX) for name in names):
        return False
    _say("Downloading torch with uv")
    # uv chooses the version of CUDA that the driver supports.
    backend = ("--torch-backend", "auto" if has_driver else "cpu")
    command = [uv, "pip", "install", "--python", sys.executable, *backend, requirement]
    if subprocess.run(command, check=False).returncode == 0:
        return True
    _say("uv could not install torch; trying pip")
    return False


def _answer_of_pip(*words: str) -> str:
    """Return what pip prints; "" if it fails, whatever the reason."""
    return _pip(*words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def _pip(
    *words: str, stdout: int | None = None, stderr: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pip", *words]
    return subprocess.run(command, stdout=stdout, stderr=stderr, text=True, check=False)


def _say(line: str) -> None:
    print(f"== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
