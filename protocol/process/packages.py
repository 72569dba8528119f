"""Checks that Tidegate's top-level packages, which have common names, are complete and unchanged.

Another distribution may contain a package with the same name. If it is installed in the same
environment, its package hides ours, or its files are mixed with ours, and uninstalling it also
removes files of ours. The checks look up where Python finds the packages, and compare their files
with the installer's list (RECORD).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("protocol", "gateway", "engine_core", "worker", "tools", "simulator")
"""The names of Tidegate's packages."""
HOME = Path(__file__).parents[2]
"""The directory with all packages of this installation."""
_SOURCES = (".py", ".so")
_FIRST_FILES = tuple(f"{room}/{name}.py" for room in ROOMS for name in ("__init__", "__main__"))
_INFO = ".dist-info"


@dataclass(frozen=True, slots=True)
class PackageProblem:
    """A problem with the installed packages."""

    message: str
    #: Whether Tidegate would fail or work wrongly because of it.
    is_fatal: bool = True


def check_rooms(home: Path = HOME, *, thorough: bool = False) -> list[PackageProblem]:
    """Return the problems of the installed packages, without importing them.

    home       the directory that contains the packages
    thorough   compare the size of every file. Otherwise compare only `__init__.py` and
               `__main__.py`, which another package of the same name would also have; this takes a
               few milliseconds
    """
    found = [PackageProblem(message) for room in ROOMS if (message := _misplaced(room, home))]
    return found or list(_mixed(home, thorough))


def _misplaced(room: str, home: Path) -> str:
    """Return why `import room` would not import our package; "" if it would."""
    try:
        spec = importlib.util.find_spec(room)
    except (ImportError, ValueError):
        spec = None
    ours = home / room
    if not (ours / "__init__.py").is_file():
        return f"the package {room} has no __init__.py: a part of Tidegate was removed from {ours}"
    # A folder without __init__.py is a package, too, and hides ours in an editable installation.
    folders = [*(spec.submodule_search_locations or ())] if spec else []
    if folders:
        found = Path(folders[0])
    elif spec and spec.origin:  # a module, not a package
        found = Path(spec.origin)
    else:
        return f"the package {room} in {ours} cannot be imported"
    if found != ours:
        names = [f"{room}/{name}" for name in os.listdir(found)] if folders else [found.name]
        owner = next(iter(_owners(found.parent, names).values()), "")
        owner_text = f" of {owner}" if owner else ""
        return f"the package {room} is {found}{owner_text}, which hides Tidegate's own in {ours}"
    return ""


def _mixed(home: Path, thorough: bool) -> Iterator[PackageProblem]:
    """Yield the differences between our files and the installer's list; none in a source tree."""
    ours = _installed(home)
    if not ours:
        return
    there = set(_files(home))
    missing = [path for path in ours if path not in there]
    foreign = sorted(there - ours.keys())
    changed = [
        path
        for path, size in ours.items()
        if path in there
        and (thorough or path.endswith(_FIRST_FILES))
        and os.stat(home / path).st_size != size
    ]
    if not (missing or changed or foreign):
        return
    owners = _owners(home, [*missing, *changed, *foreign])
    if missing:
        yield PackageProblem(f"{_listed(missing)} is missing from {home}")
    if replaced := [path for path in changed if path in owners]:
        owner_text = _listed(sorted({owners[path] for path in replaced}))
        yield PackageProblem(f"{_listed(replaced)} was replaced by {owner_text}")
    if edited := [path for path in changed if path not in owners]:
        yield PackageProblem(
            f"{_listed(edited)} was changed after the installation", is_fatal=False
        )
    if foreign:
        owner_text = _listed(sorted({owners[path] for path in foreign if path in owners}))
        yield PackageProblem(
            f"{_listed(foreign)} belongs to {owner_text or 'no known package'}; "
            "removing that may remove files of Tidegate",
            is_fatal=False,
        )


def _installed(home: Path) -> Mapping[str, int]:
    """Return the files that pip's RECORD lists for our packages, as path -> size in bytes. Only
    source files are included. Return {} if there is no RECORD, as in a source tree."""
    for record in home.glob(f"tidegate-*{_INFO}/RECORD"):
        rows = (line.rsplit(",", 2) for line in record.read_text().splitlines())
        return {
            path: int(size)
            for path, _, size in rows
            if path.endswith(_SOURCES) and path.partition("/")[0] in ROOMS and size
        }
    return {}


def _files(home: Path) -> Iterator[str]:
    """Yield the paths of all source files that are in our packages now."""
    folders = list(ROOMS)
    while folders:
        folder = folders.pop()
        with os.scandir(home / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}"
                if entry.name.endswith(_SOURCES):
                    yield path
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(path)


def _owners(home: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return path -> "NAME VERSION" of another distribution that installed it, for `paths`."""
    wanted = set(paths)
    found = {}
    for record in home.glob(f"*{_INFO}/RECORD"):
        name, _, version = record.parent.name.removesuffix(_INFO).rpartition("-")
        if name == "tidegate":
            continue
        for line in record.read_text(errors="replace").splitlines():
            path = line.rsplit(",", 2)[0]
            if path in wanted:
                found[path] = f"{name} {version}"
    return found


def _listed(names: list[str]) -> str:
    """Return the first name and the number of the others: "a.py (and 3 more)"."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return names[0] + more if names else ""
