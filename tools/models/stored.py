"""All models in the caches of this machine: from the catalogue, from the Hub, and from URLs."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from protocol.process.exit_codes import ExitCode
from protocol.shared.gguf_parts import all_parts
from protocol.shared.mmproj import is_mmproj, mmproj_files
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, HUB_MODELS
from tools.models.download import PARTIAL
from tools.models.fetch import cached_file, is_cached, locked_if_free
from tools.models.hub_cache import cached_models, repository_folder, repository_lock
from tools.models.names import MAIN, parse_hub_name
from tools.models.records import (
    BLOBS,
    SNAPSHOTS,
    PulledFile,
    PulledModel,
    place_of,
    read_records,
    remove_model,
)


def hub_cache() -> Path | None:
    """Return the directory of the Hub's cache; None if the Hub's library is not installed."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    return Path(HF_HUB_CACHE)


def stored_models(home: Path, cache: Path | None = None) -> list[PulledModel]:
    """Return the models in `home` and in the Hub's cache.

    cache   directory of the Hub's cache; None: that of this user

    Models that other programs downloaded into the Hub's cache are included.
    """
    cache = cache or hub_cache()
    records = read_records(home)
    known = {model.path for model in records}
    others = [model for model in cached_models(cache) if model.path not in known] if cache else []
    return [*_catalogue_models(home), *records, *others]


def _catalogue_models(home: Path) -> list[PulledModel]:
    """Return the downloaded models of the catalogue that come from the package index."""
    entries = [entry for entry in CATALOGUE.values() if is_cached(entry, home)]
    files = [cached_file(entry, home) for entry in entries]
    return [
        PulledModel(
            name=entry.name,
            kind="GGUF",
            path=str(file),
            files=[PulledFile(str(file), entry.file_bytes, f"sha256 {entry.file_sha256}")],
            licence=entry.licence,
        )
        for entry, file in zip(entries, files, strict=True)
    ]


def find_stored(name: str, models: Sequence[PulledModel]) -> list[PulledModel]:
    """Return the stored models that `name` denotes. A name on the Hub without a revision denotes
    all stored revisions.

    name   a name that `tidegate models` lists, a name from the catalogue, a path, or a file name

    Raises Failure if there is none, or if a file name is not unique.
    """
    parsed = parse_hub_name(_source(name))
    wanted = str(parsed) if parsed is not None else name.partition("#sha256")[0]
    if found := [model for model in models if wanted in (model.name, model.path)]:
        if parsed is not None and parsed.revision == MAIN:
            found += [model for model in models if _is_revision_of(model.name, wanted)]
        return found
    found = [model for model in models if Path(model.path).name == wanted]
    if len(found) == 1:
        return found
    if found:
        choices = ", ".join(model.name for model in found)
        raise _bad_model(f"{name} names several models: {choices}")
    close = get_close_matches(name, [model.name for model in models], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see: tidegate models"
    raise _bad_model(f"{name} is not in the cache; {hint}")


def _is_revision_of(name: str, wanted: str) -> bool:
    """Return whether `name` is `wanted` with a revision. `wanted` itself has none."""
    parsed = parse_hub_name(name)
    if parsed is None or parsed.revision == MAIN:
        return False
    return wanted == parsed.repo + (f":{parsed.choice}" if parsed.choice else "")


def files_in_use(paths: Iterable[str]) -> frozenset[Path]:
    """Return the places (`records.place_of`) of all files that processes read which load `paths`,
    and of the links that lead to them.

    paths   directories of models or adapters, and GGUF files, whose further parts and
            image encoders are included
    """
    files = (file for path in paths for file in _files_at(path))
    return frozenset(place for file in files for place in _places(file))


def _files_at(path: str) -> Iterator[Path]:
    folder = Path(path)
    if folder.is_dir():
        yield from _places(folder)  # links to the directory itself
        yield from (file for file in folder.rglob("*") if file.is_file())
    else:
        yield from map(Path, all_parts(path))
        if not is_mmproj(folder.name):
            yield from mmproj_files(folder)


def _places(file: Path) -> Iterator[Path]:
    """Yield the places of a file and of each link on the way to it."""
    if not file.exists():
        return
    while True:
        yield (file := place_of(file))
        if not file.is_symlink():
            return
        file = file.parent / file.readlink()


def remove_stored(
    home: Path,
    models: Sequence[PulledModel],
    cache: Path | None = None,
    *,
    in_use: Collection[Path] = frozenset(),
) -> int:
    """Remove models from the cache, but keep the files that other models use. Return the number of
    bytes freed.

    in_use   places of more files to keep (`files_in_use`)

    Raises OSError if a file cannot be removed.
    """
    paths = {model.path for model in models}
    others = [model for model in stored_models(home, cache) if model.path not in paths]
    freed = sum(remove_model(home, model, others, in_use) for model in models)
    for model in models:
        if model.name in CATALOGUE and place_of(Path(model.path)) not in in_use:
            shutil.rmtree(Path(model.path).parent, ignore_errors=True)
    return freed


def remove_leftovers(name: str, home: Path, cache: Path | None) -> bool:
    """Remove the partial files of an interrupted download. Return whether there were any. While
    another process downloads from the same repository, its partial files are no leftovers.

    name    a name on the Hub, or a name from the catalogue
    home    Tidegate's directory of downloads
    cache   directory of the Hub's cache; None if there is none

    Raises OSError if a file cannot be removed.
    """
    parsed = parse_hub_name(_source(name))
    if parsed is None or cache is None:
        return False
    folder = repository_folder(cache, parsed.repo)
    if not folder.is_dir():
        return False
    lock = repository_lock(home, parsed.repo)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked_if_free(lock) as is_free:
        return is_free and _remove_partials(folder)


def _remove_partials(folder: Path) -> bool:
    """Remove the partial files in the folder of a repository. Return whether there were any."""
    if not any((folder / SNAPSHOTS).glob("*/*")):  # nothing but leftovers
        shutil.rmtree(folder)
        return True
    partials = list((folder / BLOBS).glob(f"*{PARTIAL}"))
    for partial in partials:
        partial.unlink()
    return bool(partials)


def _source(name: str) -> str:
    """Return the name on the Hub if `name` is one of HUB_MODELS, else `name` itself."""
    return HUB_MODELS[name].source if name in HUB_MODELS else name


def _bad_model(message: str) -> Failure:
    return Failure(message, exit_code=ExitCode.BAD_MODEL)
