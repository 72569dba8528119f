"""Sizes of what an installation of `tidegate[all]` puts on a disk: for each package the size of its
installed files, the size of Tidegate's own wheel by package, and the whole environment.

    python -m tests.benchmarks.installed_size           # Markdown tables
    python -m tests.benchmarks.installed_size --wheel   # also build our wheel, which takes minutes

The requirements are those of setup.py for this Python and this machine, and theirs in turn, as they
are installed in the environment that runs the program. Bytecode is not counted. A package that is
not installed is listed without a size.
"""

from __future__ import annotations

import argparse
import configparser
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRA = "all"
MIB = 1 << 20
SMALL = MIB
"""Packages of others below this size are added up in one row."""


DECLARED = """
import json, runpy
import setuptools
setuptools.setup = lambda **options: print(json.dumps(options["extras_require"]))
runpy.run_path("setup.py")
"""
"""A program that prints the requirements of each extra of setup.py."""


def declared_requirements(extra: str) -> list[str]:
    """Return the requirements of Tidegate with an extra, as setup.py and setup.cfg declare them."""
    # In a process of its own, where nothing imports distutils before setuptools does.
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DECLARED], cwd=ROOT, capture_output=True, check=True
    )
    extras = json.loads(told.stdout)
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    base = parsed["options"]["install_requires"].split("\n")
    return [*filter(None, base), *extras[extra]]


def needed(requirements: Iterable[str]) -> dict[str, Distribution | None]:
    """Return the distributions that the requirements need, and those that these need, by name. The
    value is None for one that is not installed."""
    found: dict[str, Distribution | None] = {}
    waiting = [Requirement(each) for each in requirements]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            own = distribution(name)
        except PackageNotFoundError:
            found.setdefault(name, None)
            continue
        found[name] = own
        for text in own.requires or ():
            child = Requirement(text)
            extras = ["", *requirement.extras]
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(child)
    return found


def installed_bytes(package: Distribution) -> int:
    """Return the size of the files that a distribution has installed, without bytecode."""
    paths = (Path(str(file.locate())) for file in package.files or () if file.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file())


def environment_bytes() -> int:
    """Return the size of the environment that runs this program, without bytecode and links."""
    paths = (path for path in Path(sys.prefix).rglob("*") if path.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())


def source_bytes() -> Counter[str]:
    """Return the size of the Python sources and the kernels' sources of each of our packages."""
    sizes: Counter[str] = Counter()
    for folder in sorted(path.parent for path in ROOT.glob("*/__init__.py")):
        if folder.name != "tests":
            files = (f for f in folder.rglob("*") if f.suffix not in (".pyc", ".so"))
            sizes[folder.name] = sum(file.stat().st_size for file in files if file.is_file())
    return sizes


def wheel_bytes() -> tuple[int, Counter[str]]:
    """Build our wheel. Return its size, and the compressed sizes of its packages."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            folder,
            str(ROOT),
        ]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        sizes: Counter[str] = Counter()
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                sizes[member.filename.split("/")[0]] += member.compress_size
        return wheel.stat().st_size, sizes


def table(title: str, sizes: Iterable[tuple[str, int | None]], small_bytes: int = 0) -> list[str]:
    """Return the lines of a Markdown table, the largest first. What is below `small_bytes` is added
    up in one row."""
    rows = sorted(sizes, key=lambda row: -(row[1] or 0))
    large = [(name, size) for name, size in rows if size is None or size >= small_bytes]
    small = [size for _, size in rows if size is not None and size < small_bytes]
    if small:
        large.append((f"{len(small)} smaller ones", sum(small)))
    total = sum(size for _, size in rows if size)
    lines = [f"| {title} | MiB |", "|---|---|"]
    lines += [f"| {name} | {_in_mib(size)} |" for name, size in large]
    return [*lines, f"| together | {_in_mib(total)} |"]


def _in_mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--wheel", action="store_true", help="build our wheel, too")
    options = parser.parse_args()
    packages = needed(declared_requirements(EXTRA))
    print(f"requirements of tidegate[{EXTRA}]: {len(packages)} packages\n")
    sizes = [
        (name, None if own is None else installed_bytes(own)) for name, own in packages.items()
    ]
    print("\n".join(table("package", sizes, SMALL)))
    print()
    print("\n".join(table("Tidegate's sources", list(source_bytes().items()))))
    if options.wheel:
        total, parts = wheel_bytes()
        print(f"\nour wheel: {total / MIB:.1f} MiB\n")
        print("\n".join(table("part of the wheel", list(parts.items()))))
    whole = environment_bytes() / MIB
    print(f"\nthis environment, with what else is installed in it: {whole:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
