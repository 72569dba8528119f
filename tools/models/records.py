"""Records of the models that were downloaded from the Hugging Face Hub or from a URL.

A record is written after every file of a model is complete and verified. `tidegate serve` therefore
needs neither the network nor the library of the Hub to find a model that has a record.

    $TIDEGATE_HOME/models/records/NAME.json     NAME is quoted as in a URL
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

SNAPSHOTS, BLOBS = "snapshots", "blobs"
"""Folders of a repository in the Hub's cache: names of the files, and their content."""


class PulledFile(msgspec.Struct, frozen=True):
    """A file of a downloaded model."""

    path: str
    size: int
    #: Verified digest, as text: "sha256 HEX" or "git sha1 HEX". "": not verified.
    digest: str = ""


class PulledModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the cache."""

    #: The name by which the user can serve and remove the model.
    name: str
    #: "safetensors" or "GGUF".
    kind: str
    #: The directory or the .gguf file that the worker loads.
    path: str
    files: list[PulledFile]
    licence: str = ""
    #: Commit of the repository; "" for a URL.
    commit: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def is_complete(self) -> bool:
        """Return whether every file exists and has its recorded size."""
        return all(_size(Path(file.path)) == file.size for file in self.files)


def records_folder(home: Path) -> Path:
    return home / "models" / "records"


def _record_file(home: Path, name: str) -> Path:
    return records_folder(home) / f"{quote(name, safe='')}.json"


def read_record(home: Path, name: str) -> PulledModel | None:
    """Return the record of a model. Return None if there is no readable record, or if a file of the
    model is missing or has another size."""
    model = _read(_record_file(home, name))
    return model if model is not None and model.is_complete() else None


def read_records(home: Path) -> list[PulledModel]:
    """Return the records of all complete models, sorted by name."""
    found = (_read(file) for file in sorted(records_folder(home).glob("*.json")))
    return [model for model in found if model is not None and model.is_complete()]


def write_record(home: Path, model: PulledModel) -> None:
    """Write the record of a model. Raises OSError if that is not possible."""
    file = _record_file(home, model.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(model)))
    partial.replace(file)


def _read(file: Path) -> PulledModel | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=PulledModel)
    return None


def _size(file: Path) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return None


def place_of(file: Path) -> Path:
    """Return the absolute path of a file, or of a link itself, by real folders only. All spellings
    of a path have the same place."""
    return file.parent.resolve() / file.name


def remove_model(
    home: Path,
    model: PulledModel,
    others: Iterable[PulledModel],
    in_use: Collection[Path] = frozenset(),
) -> int:
    """Remove a model's record, and those of its files that nobody else uses. Return the number of
    bytes freed. If all its files are in use, the record stays too.

    others   models whose files stay
    in_use   places (`place_of`) of further files and links that stay

    Raises OSError if a file cannot be removed.
    """
    files = [Path(file.path) for file in model.files]
    if files and all(place_of(file) in in_use for file in files):
        return 0
    shared = {file.path for other in others for file in other.files}
    removed = [file for file in files if str(file) not in shared and place_of(file) not in in_use]
    freed = sum(_remove_file(file, in_use) for file in removed)
    _record_file(home, model.name).unlink(missing_ok=True)
    for file in files:
        _remove_empty_folders(file.parent, in_use)
    return freed


def _remove_file(file: Path, in_use: Collection[Path]) -> int:
    """Remove a file. If it links to content in the Hub's cache, remove the content too, unless it
    is in use or another link leads to it. Return the number of bytes freed."""
    content = file.resolve() if file.is_symlink() else None
    size = _size(file) or 0
    file.unlink(missing_ok=True)
    repository = _repository_of(file)
    if content is None or repository is None or content.parent != (repository / BLOBS).resolve():
        return size
    links = (repository / SNAPSHOTS).rglob("*")
    if content in in_use or any(link.is_symlink() and link.resolve() == content for link in links):
        return 0
    content.unlink(missing_ok=True)
    return size


def _repository_of(file: Path) -> Path | None:
    """Return the folder of the repository in the Hub's cache that contains `file`, if any."""
    found = [folder for folder in file.parents if folder.name == SNAPSHOTS]
    return found[0].parent if found else None


def _remove_empty_folders(folder: Path, in_use: Collection[Path]) -> None:
    """Remove `folder` and its parents while they are empty, and a repository without files."""
    repository = _repository_of(folder / "file")
    with contextlib.suppress(OSError):
        while True:
            folder.rmdir()  # fails if it is not empty
            folder = folder.parent
            if repository is None or folder == repository:
                break
    if repository is None or any((repository / SNAPSHOTS).glob("*/*")):
        return
    root = repository.resolve()
    if not any(file.is_relative_to(root) for file in in_use):
        shutil.rmtree(repository, ignore_errors=True)
