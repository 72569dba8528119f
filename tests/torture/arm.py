"""Computes the golden numbers of the kernels on emulated ARM processors.

    python -m tests.torture.arm [--sets neon,i8mm] [--root FOLDER] [--qemu PATH] [TEST ...]

Each instruction set of ARM is compiled with aarch64-linux-gnu-g++, and qemu-aarch64 runs
`tests/unit/test_kernel_bits.py` for it, or other tests, with Python and torch for ARM. The
emulated processor has this set, and not the better ones. Of tests that have a parameter for each
set, those of this one run.

Python for ARM and its packages are in FOLDER, by default ~/.cache/tidegate-arm (900 MB). The first
run makes it with apt-get and pip, in a few minutes and without rights of an administrator. Debian's
sources must have the architecture arm64. If a program is missing, the command says so and does
nothing. A set takes about two minutes of one core.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.emulated import CSRC, OPTIONS, ROOT
from tests.torture.table import print_table
from worker.kernels.instruction_sets import InstructionSet, sets_of

COMPILER = "aarch64-linux-gnu-g++"
MACHINE = "aarch64"
EMULATED = {"i8mm": "max", "neon": "neoverse-n1", "generic": "cortex-a72"}
"""Instruction set -> the processor that qemu emulates."""
LEAST_QEMU = (8, 0)
"""Older versions crash when torch is imported, and list no features in /proc/cpuinfo."""
SYSTEM = ("python3", "libpython3-stdlib", "libstdc++6", "libgomp1")
"""Debian's packages. apt-get adds those that they need."""
TORCH = "2.9.1"
"""The last version whose wheel for ARM on PyPI is built for CPUs."""
PACKAGES = (
    *("gguf", "hypothesis", "llguidance", "msgspec", "networkx", "numpy", "psutil", "pytest"),
    *("pytest-timeout", "pyzmq", "safetensors", "sympy", "tokenizers", "transformers"),
)
"""Python's packages, in the versions of this environment."""
PLATFORMS = [f"manylinux_2_{minor}" for minor in range(17, 37)] + ["manylinux2014"]
"""Those of glibc 2.36, which Debian 12 has."""
GOLDEN_TEST = "tests/unit/test_kernel_bits.py::test_results_are_the_golden_ones"
COLUMNS = {"set": 10, "processor": 14, "seconds": 8, "last line": 0}
GUEST = "import sys; from tests.torture.arm import in_guest; sys.exit(in_guest(sys.argv[1:]))"


class MissingProgram(Exception):
    """The tests cannot run here. The message says what is missing."""


@dataclass(frozen=True)
class ArmRow:
    """The result of one set's tests: their output and exit code."""

    instructions: InstructionSet
    seconds: float
    exit_code: int
    printed: str

    def cells(self) -> tuple[str, ...]:
        lines = self.printed.splitlines() or [""]
        name = self.instructions.name
        return name, EMULATED[name], f"{self.seconds:.0f}", lines[-1]

    def complaints(self, slack: float) -> list[str]:
        return [self.printed] if self.exit_code else []


@dataclass(frozen=True)
class ArmSystem:
    """A folder with Python for ARM, and the emulator that runs it.

    qemu-aarch64 looks for each absolute path below `root` first. So no rights of an administrator
    are needed, and the tests read the working tree where it is.
    """

    root: Path
    qemu: str

    @property
    def python(self) -> Path:
        return self.root / "usr/bin/python3"

    @property
    def packages(self) -> Path:
        return self.root / "packages"

    def run(self, processor: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python on an emulated processor."""
        path = f"PYTHONPATH={self.packages}:{ROOT}"
        command = ["env", path, "PYTHONDONTWRITEBYTECODE=1", self.qemu, "-cpu", processor]
        command += ["-L", str(self.root), str(self.python), *arguments]
        return subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def make(self) -> None:
        """Make the folder, unless it is whole."""
        stamp = self.root / "whole"
        if stamp.exists():
            return
        print(f"== Making {self.root}: Python, torch and other packages for ARM", flush=True)
        self.root.mkdir(parents=True, exist_ok=True)
        self._unpack_system()
        self._describe_processor()
        self._install_packages()
        stamp.touch()

    def _unpack_system(self) -> None:
        state = self.root / "apt"
        for folder in ("lists/partial", "cache/archives/partial"):
            (state / folder).mkdir(parents=True, exist_ok=True)
        (state / "status").touch()  # nothing is installed, so all that is needed is downloaded
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures::": "arm64",
            "APT::Sandbox::User": "root",
            "Dir::State": str(state),
            "Dir::State::status": str(state / "status"),
            "Dir::Cache": str(state / "cache"),
        }
        apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in settings.items())]
        subprocess.run([*apt, "update"], check=True)
        options = ("--yes", "--download-only", "--no-install-recommends")
        subprocess.run([*apt, "install", *options, *SYSTEM], check=True)
        for archive in (state / "cache/archives").glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, self.root], check=True)

    def _describe_processor(self) -> None:
        """Write the file that torch's libraries read, which the emulator does not provide."""
        core = self.root / "sys/devices/system/cpu/cpu0"
        (core / "cache").mkdir(parents=True, exist_ok=True)
        (core / "regs/identification").mkdir(parents=True, exist_ok=True)
        (core / "regs/identification/midr_el1").write_text("0x00000000410fd0c1\n")  # Neoverse N1

    def _install_packages(self) -> None:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        release = self.run("max", "-c", code).stdout.strip()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade"]
        pip += ["--target", str(self.packages), "--only-binary=:all:", "--python-version", release]
        pip += ["--implementation", "cp", *(f"--platform={name}_{MACHINE}" for name in PLATFORMS)]
        # pip would read the requirements of torch for this machine's own architecture.
        subprocess.run([*pip, "--no-deps", f"torch=={TORCH}"], check=True)
        named = [f"{name}=={version(name)}" for name in PACKAGES]
        subprocess.run([*pip, *named, "jinja2", "filelock", "fsspec"], check=True)


def compile_set(instructions: InstructionSet, folder: Path) -> None:
    """Compile the library of one set into `folder`."""
    target = folder / f"_{instructions.name}.abi3.so"
    command = [COMPILER, *OPTIONS, *instructions.options, str(CSRC / "kernels.cpp")]
    subprocess.run([*command, "-o", str(target)], check=True)


def outcomes(
    sets: Sequence[InstructionSet], system: ArmSystem, tests: Sequence[str]
) -> Iterator[ArmRow]:
    for each in sets:
        with tempfile.TemporaryDirectory(prefix="tidegate-arm-") as folder:
            compile_set(each, Path(folder))
            start = time.monotonic()
            done = system.run(EMULATED[each.name], "-c", GUEST, folder, "-k", each.name, *tests)
            seconds = time.monotonic() - start
        yield ArmRow(each, seconds, done.returncode, done.stdout.strip())


class GuestLibraries:
    """A pytest plugin. The tests load the libraries in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_configure(self) -> None:
        from worker.kernels import library

        library.FOLDER = self._folder


def in_guest(arguments: Sequence[str]) -> int:
    """Run tests on the emulated processor. The first argument is the folder of the libraries."""
    folder, *rest = arguments
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts="]
    return pytest.main([*options, *rest], plugins=[GuestLibraries(Path(folder))])


def qemu_version(printed: str) -> tuple[int, ...]:
    """Return the version in the output of `qemu-aarch64 --version`; () if there is none."""
    found = re.search(r"version (\d+)\.(\d+)", printed)
    return tuple(map(int, found.groups())) if found else ()


def check_programs(qemu: str) -> None:
    """Raise MissingProgram if a program is missing or too old."""
    for program in (COMPILER, qemu, "apt-get", "dpkg-deb"):
        if not shutil.which(program):
            raise MissingProgram(f"{program} is not installed")
    printed = subprocess.run([qemu, "--version"], capture_output=True, text=True).stdout
    if qemu_version(printed) < LEAST_QEMU:
        least = ".".join(map(str, LEAST_QEMU))
        raise MissingProgram(f"{qemu} is older than {least}, which imports torch; see --qemu")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.arm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sets", default="i8mm,neon,generic", help="instruction sets")
    parser.add_argument("--root", type=Path, default=Path.home() / ".cache/tidegate-arm")
    parser.add_argument("--qemu", default="qemu-aarch64", help="the emulator, of 8.0 or newer")
    parser.add_argument("tests", nargs="*", default=[GOLDEN_TEST])
    options = parser.parse_args(arguments)
    names = options.sets.split(",")
    sets = [each for each in sets_of(MACHINE) if each.name in names]
    if unknown := set(names) - {each.name for each in sets}:
        parser.error(f"--sets: ARM has no set {', '.join(sorted(unknown))}")
    try:
        check_programs(options.qemu)
    except MissingProgram as missing:
        print(f"skipped: {missing}")
        return 0
    system = ArmSystem(options.root.absolute(), options.qemu)
    system.make()
    return print_table(COLUMNS, outcomes(sets, system, options.tests), 1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
