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
import shlex
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

from tests.emulated import CSRC, GOLDEN_TEST, OPTIONS, ROOT
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
    *("argcomplete", "flask", "gevent", "gunicorn", "prometheus-client", "tqdm"),
)
"""Python's packages, in the versions of this environment. Those of the last line are for
arm_server.py."""
PLATFORMS = [f"manylinux_2_{minor}" for minor in range(17, 37)] + ["manylinux2014"]
"""Those of glibc 2.36, which Debian 12 has."""
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

    def launcher(self, processor: str) -> Path:
        """Return a script that runs Python on an emulated processor. In that Python it is
        `sys.executable`, so programs that are started with this are emulated as well, and this
        machine needs no entry of binfmt_misc for ARM. It lies beside Python, because Python looks
        for its libraries relative to `sys.executable`."""
        script = self.python.with_name(f"python3-{processor}")
        emulated = [self.qemu, "-cpu", processor, "-L", str(self.root), "-0", str(script)]
        command = shlex.join([*emulated, str(self.python)])
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
        return script

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
        wanted = " ".join([*SYSTEM, f"torch=={TORCH}", *requirements()])
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"== Making {self.root}: Python, torch and other packages for ARM", flush=True)
        self.root.mkdir(parents=True, exist_ok=True)
        self._unpack_system()
        self._describe_processor()
        self._install_packages()
        stamp.write_text(wanted)

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
        subprocess.run([*pip, *requirements()], check=True)


def requirements() -> list[str]:
    """Return the packages that are installed beside torch."""
    named = [f"{name}=={version(name)}" for name in PACKAGES]
    return [*named, "jinja2", "filelock", "fsspec"]


def compile_set(instructions: InstructionSet, folder: Path, *options: str) -> None:
    """Compile the library of one set into `folder`."""
    target = folder / f"_{instructions.name}.abi3.so"
    command = [COMPILER, *OPTIONS, *options, *instructions.options, str(CSRC / "kernels.cpp")]
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


def argument_parser(program: str, description: str | None, sets: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all programs with emulated processors have.

    sets   the default of --sets
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.torture.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sets", type=chosen_sets, default=sets, help="instruction sets")
    parser.add_argument("--root", type=Path, default=Path.home() / ".cache/tidegate-arm")
    parser.add_argument("--qemu", default="qemu-aarch64", help="the emulator, of 8.0 or newer")
    return parser


def chosen_sets(names: str) -> list[InstructionSet]:
    """Return the sets of ARM with these names. Raises ArgumentTypeError if there is none."""
    sets = [each for each in sets_of(MACHINE) if each.name in names.split(",")]
    if unknown := set(names.split(",")) - {each.name for each in sets}:
        raise argparse.ArgumentTypeError(f"ARM has no set {', '.join(sorted(unknown))}")
    return sets


def made_system(options: argparse.Namespace) -> ArmSystem | None:
    """Make what the options name. If a program is missing, print that, and return None."""
    try:
        check_programs(options.qemu)
    except MissingProgram as missing:
        print(f"skipped: {missing}")
        return None
    system = ArmSystem(options.root.absolute(), options.qemu)
    system.make()
    return system


def main(arguments: Sequence[str]) -> int:
    parser = argument_parser("arm", __doc__, "i8mm,neon,generic")
    parser.add_argument("tests", nargs="*", default=[GOLDEN_TEST])
    options = parser.parse_args(arguments)
    system = made_system(options)
    if system is None:
        return 0
    return print_table(COLUMNS, outcomes(options.sets, system, options.tests), 1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
