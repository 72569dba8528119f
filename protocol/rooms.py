"""Whether our top-level packages, whose names are ordinary words, are ours and whole.

Another distribution may have a package of the same name. Installed into the same environment it
shadows ours, or its files are mixed into ours, and uninstalling it removes ours with them. This is
found by the list of files that the installer has written (RECORD), and by where packages are found.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("protocol", "gateway", "engine_core", "worker", "tools")
HOME = Path(__file__).parents[1]
"""The folder in which all packages of this installation lie: this one is ours for certain."""
REMEDY = (
    "reinstall Tidegate in an environment of its own: pipx install 'tidegate[all]', or "
    "uv tool install 'tidegate[all]'"
)
_SOURCES = (".py", ".so")
_BEGINNINGS = tuple(f"{room}/{name}.py" for room in ROOMS for name in ("__init__", "__main__"))
_INFO = ".dist-info"


@dataclass(frozen=True, slots=True)
class RoomTrouble:
    """is_fatal: the programs would not work, or not as they are meant to."""

    said: str
    is_fatal: bool = True


def check_rooms(home: Path = HOME, *, thorough: bool = False) -> list[RoomTrouble]:
    """Return what is wrong with the packages, without importing them.

    thorough   look at every file's size; else only at the files that begin a package, which another
               package replaces first: that takes a few milliseconds
    """
    found = [RoomTrouble(said) for room in ROOMS if (said := _misplaced(room, home))]
    return found or list(_mixed(home, thorough))


def _misplaced(room: str, home: Path) -> str:
    """Return why Python would import something else as this package; "" if it would not."""
    try:
        spec = importlib.util.find_spec(room)
    except (ImportError, ValueError):
        spec = None
    ours = home / room
    if not (ours / "__init__.py").is_file():
        return f"the package {room} has no __init__.py: a part of Tidegate was removed from {ours}"
    # A folder without an __init__.py is a package, too. It hides ours in an editable install.
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
        whose = f" of {owner}" if owner else ""
        return f"the package {room} is {found}{whose}, which hides Tidegate's own in {ours}"
    return ""


def _mixed(home: Path, thorough: bool) -> Iterator[RoomTrouble]:
    """Yield what differs from the list of installed files; nothing of a source tree, which has no
    such list."""
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
        and (thorough or path.endswith(_BEGINNINGS))
        and os.stat(home / path).st_size != size
    ]
    if not (missing or changed or foreign):
        return
    owners = _owners(home, [*missing, *changed, *foreign])
    if missing:
        yield RoomTrouble(f"{_listed(missing)} is missing from {home}")
    if replaced := [path for path in changed if path in owners]:
        whose = _listed(sorted({owners[path] for path in replaced}))
        yield RoomTrouble(f"{_listed(replaced)} was replaced by {whose}")
    if edited := [path for path in changed if path not in owners]:
        yield RoomTrouble(f"{_listed(edited)} was changed after the installation", is_fatal=False)
    if foreign:
        whose = _listed(sorted({owners[path] for path in foreign if path in owners}))
        yield RoomTrouble(
            f"{_listed(foreign)} belongs to {whose or 'no known package'}, whose removal may "
            "remove files of Tidegate",
            is_fatal=False,
        )


def _installed(home: Path) -> Mapping[str, int]:
    """Return path -> size of the sources that were installed with Tidegate's packages."""
    for record in home.glob(f"tidegate-*{_INFO}/RECORD"):
        rows = (line.rsplit(",", 2) for line in record.read_text().splitlines())
        return {
            path: int(size)
            for path, _, size in rows
            if path.endswith(_SOURCES) and path.partition("/")[0] in ROOMS and size
        }
    return {}


def _files(home: Path) -> Iterator[str]:
    """Yield the paths of all sources in our packages' folders."""
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
    """Return path -> "NAME VERSION" of another distribution in `home` that has installed it."""
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
    """Return the first name, and how many more there are."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return names[0] + more if names else ""
