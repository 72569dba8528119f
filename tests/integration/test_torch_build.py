"""`make serve` installs torch for CPUs if there is no NVIDIA driver, and prints the size first.

The indexes are folders with fake builds of torch. pip is a real one, in an environment of its own.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from protocol.process.exit_codes import ExitCode
from tests.support.ports import free_port
from tests.support.torch_index import (
    CPU_BYTES,
    CPU_VERSION,
    CUDA_VERSION,
    OUTDATED_VERSION,
    TORCH,
    add_wheel,
    serve_folder,
    write_cuda_index,
)
from tools.torch_build import DRIVER, PlannedPackage, describe, find_driver, torch_requirement
from worker.device import cuda_driver

ROOT = Path(__file__).parents[2]
REQUIREMENT = torch_requirement(ROOT / "setup.py")
CUDA_TOTAL = "3 packages, 2.2 GB"


@dataclass(frozen=True)
class Indexes:
    """URLs of indexes of fake builds, which can be planned but not downloaded.

    both      the builds for CUDA and for CPUs
    outdated  the build for CUDA, and one for CPUs that no requirement of ours allows
    """

    cuda: str
    cpu: str
    both: str
    outdated: str


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexes]:
    folder = tmp_path_factory.mktemp("indexes")
    for name in ("cuda", "both", "outdated"):
        write_cuda_index(folder / name)
    for name in ("cpu", "both"):
        add_wheel(folder / name, TORCH, CPU_VERSION, size=CPU_BYTES)
    add_wheel(folder / "outdated", TORCH, OUTDATED_VERSION, size=CPU_BYTES)
    with serve_folder(folder) as url:
        yield Indexes(*(f"{url}/{field.name}/simple" for field in fields(Indexes)))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment"))


def make_environment(folder: Path) -> Path:
    """Make a virtual environment with the pip of this one, which is as new as that of `make`.
    Return its Python."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Not by importlib.util.find_spec: setuptools warns when pip is searched for after distutils.
    (packages / "pip").symlink_to(str(metadata.distribution("pip").locate_file("pip")))
    return folder / "bin" / "python"


def torch_build(python: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m tools.torch_build`. `settings` are variables of the environment, among them
    all settings of pip."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [python, "-m", "tools.torch_build", *words],
        cwd=ROOT,
        env={**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", **settings},
        capture_output=True,
        text=True,
        timeout=120,
    )


def planned(python: Path, index: str, *words: str) -> list[str]:
    """Return the lines that say what would be downloaded if `index` is that of pip."""
    done = torch_build(python, "--dry-run", *words, PIP_INDEX_URL=index)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("== ") for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", ["cuda", "both", "outdated"])
def test_without_a_driver_less_than_500_mb_are_downloaded(
    python: Path, indexes: Indexes, index: str
) -> None:
    words = ("--device", "cpu", "--cpu-index", indexes.cpu)
    lines = planned(python, getattr(indexes, index), *words)
    assert lines == [f"Downloading torch {CPU_VERSION} for CPUs: 1 package, 190 MB"]


def test_without_an_index_for_cpus_the_size_is_printed_first(
    python: Path, indexes: Indexes
) -> None:
    unreachable = f"http://127.0.0.1:{free_port()}/simple"
    lines = planned(python, indexes.cuda, "--device", "cpu", "--cpu-index", unreachable)
    assert lines == [
        f"No build of torch for CPUs was found, neither in the index of pip nor in {unreachable}",
        f"Downloading torch {CUDA_VERSION} with libraries of NVIDIA, which a CPU does not need: "
        f"{CUDA_TOTAL}",
        "Ctrl-C stops this. To name another index of builds for CPUs: "
        "make serve TORCH_CPU_INDEX=URL",
    ]


def test_with_a_driver_the_build_for_cuda_is_downloaded(python: Path, indexes: Indexes) -> None:
    lines = planned(python, indexes.cuda, "--device", "gpu", "--cpu-index", indexes.cpu)
    assert lines == [f"Downloading torch {CUDA_VERSION} for CUDA: {CUDA_TOTAL}"]


def test_a_build_for_cpus_that_pip_prefers_is_reported_on_a_machine_with_a_driver(
    python: Path, indexes: Indexes
) -> None:
    lines = planned(python, indexes.both, "--device", "gpu")
    assert lines == [
        f"Downloading torch {CPU_VERSION} for CPUs: 1 package, 190 MB",
        "GPUs cannot be used with it: an index of pip has a build for CPUs",
    ]


def test_the_build_for_cpus_is_installed_once(tmp_path: Path, indexes: Indexes) -> None:
    add_wheel(tmp_path / "index", TORCH, CPU_VERSION)
    python = make_environment(tmp_path / "environment")
    with serve_folder(tmp_path / "index") as url:
        words = ("--device", "cpu", "--cpu-index", f"{url}/simple")
        done = torch_build(python, *words, PIP_INDEX_URL=indexes.cuda)
    assert done.returncode == 0, done.stderr
    assert f"Successfully installed torch-{CPU_VERSION}" in done.stdout
    again = torch_build(python, *words, PIP_NO_INDEX="1")  # now no index can be reached
    assert (again.returncode, again.stdout) == (0, "")


def test_a_failure_of_pip_has_no_traceback(python: Path, tmp_path: Path) -> None:
    done = torch_build(python, "--device", "cpu", PIP_NO_INDEX="1")
    assert done.returncode == ExitCode.FAILED
    last = done.stderr.splitlines()[-1]
    assert last == f"pip cannot install {REQUIREMENT}; its message is above"
    assert "Traceback" not in done.stderr


# ---- uv, recorded by a program of the same name
@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu"), ("gpu", "auto")])
def test_uv_chooses_the_build_if_it_is_installed(
    python: Path, tmp_path: Path, device: str, backend: str
) -> None:
    path = recorder(tmp_path / "uv", exit_code=0)
    assert torch_build(python, "--device", device, PATH=path).returncode == 0
    (call,) = (tmp_path / "uv.calls").read_text().splitlines()
    options = f"--python {python} --torch-backend {backend}"
    assert call == f"pip install {options} {REQUIREMENT}"


def test_pip_is_used_if_uv_fails(python: Path, tmp_path: Path) -> None:
    path = recorder(tmp_path / "uv", exit_code=2)
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = torch_build(python, "--device", "gpu", PATH=path, PIP_PROXY=nowhere, PIP_RETRIES="0")
    assert "uv could not install torch; trying pip" in done.stdout
    assert "pip cannot install" in done.stderr


def test_uv_is_not_used_if_pip_has_an_index_of_its_own(
    python: Path, tmp_path: Path, indexes: Indexes
) -> None:
    path = recorder(tmp_path / "uv", exit_code=0)
    done = torch_build(python, PATH=path, PIP_EXTRA_INDEX_URL=indexes.cpu, PIP_NO_INDEX="1")
    assert done.returncode == ExitCode.FAILED
    assert not (tmp_path / "uv.calls").exists()


def recorder(program: Path, exit_code: int) -> str:
    """Write a program that records its arguments. Return a PATH on which it is the first."""
    program.write_text(f'#!/bin/sh\necho "$@" >> {program}.calls\nexit {exit_code}\n')
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


# ---- facts and sentences
def test_the_requirement_is_the_one_of_setup() -> None:
    requirement = Requirement(REQUIREMENT)
    assert requirement.name == "torch"
    assert metadata.version("torch") in requirement.specifier


def test_the_driver_is_found_by_the_library_that_a_worker_loads() -> None:
    assert DRIVER == cuda_driver.DRIVER
    assert find_driver("libc.so.6")
    assert not find_driver("libnothing.so.1")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((100_000_000, 3_000_000), "2 packages, 103 MB"),
        ((100_000_000, None), "2 packages, at least 100 MB"),
        ((None, None), "2 packages, of unknown size"),
    ],
)
def test_sizes_that_are_not_known_are_not_invented(
    sizes: tuple[int | None, int | None], text: str
) -> None:
    downloads = [
        PlannedPackage("torch", "2.13.0+cpu", sizes[0]),
        PlannedPackage("sympy", "1.14", sizes[1]),
    ]
    (line,) = describe(downloads, has_driver=False, cpu_index="")
    assert line == f"Downloading torch 2.13.0+cpu for CPUs: {text}"
