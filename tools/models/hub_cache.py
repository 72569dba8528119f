"""The models in the cache of the Hugging Face Hub, found without its library and without a network.

`tools.models.hub` describes the layout of the cache.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocol.shared.gguf_parts import is_later_part
from protocol.shared.mmproj import START_BYTES, has_usable_encoder, text_in, unusable_kind
from tools.failure import Failure
from tools.models.hub_files import RepoFile, choose_files, encoders_of
from tools.models.names import MAIN, HubName
from tools.models.records import SNAPSHOTS, PulledFile, PulledModel

REPOSITORIES = "models--*--*"
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def repository_folder(cache: Path, repo: str) -> Path:
    """Return the folder of the repository "owner/name" in `cache`."""
    return cache / f"models--{repo.replace('/', '--')}"


def repository_lock(home: Path, repo: str) -> Path:
    """Return the file that a download of the repository "owner/name" locks (`fetch.locked`)."""
    return home / "models" / f".{repo.replace('/', '--')}.lock"


def cached_model(name: HubName, snapshot: Path) -> PulledModel:
    """Return the model `name` in a snapshot of the cache. Its digests are not verified. Raises
    Failure if the snapshot lacks files that the model needs."""
    stored = _files(snapshot)
    kind, files = choose_files(name, stored)
    if kind == "GGUF":
        files = [*files, *_encoder(snapshot, files[0], stored)]
    return PulledModel(
        name=str(name),
        kind=kind,
        path=str(snapshot if kind == "safetensors" else snapshot / files[0].path),
        files=[PulledFile(str(snapshot / file.path), file.size) for file in files],
        commit=snapshot.name,
    )


def start_of(file: Path) -> bytes:
    """Return the first bytes of a GGUF file (`mmproj.START_BYTES`)."""
    with file.open("rb") as source:
        return source.read(START_BYTES)


def _encoder(snapshot: Path, model: RepoFile, stored: Sequence[RepoFile]) -> Sequence[RepoFile]:
    """Return the image encoder of a GGUF model, by the rules of a download; [] if it has none."""
    found = encoders_of(model, stored)
    if len(found) != 1:
        return []
    architecture = text_in(start_of(snapshot / model.path), "general.architecture")
    is_usable = unusable_kind(start_of(snapshot / found[0].path)) is None
    return found if is_usable and has_usable_encoder(architecture) else []


def cached_models(cache: Path) -> Iterator[PulledModel]:
    """Yield every model in the cache: each directory of safetensors and each GGUF file. The name of
    a model contains the commit if no branch or tag names its snapshot."""
    for repository in sorted(cache.glob(REPOSITORIES)):
        owner, _, repo = repository.name.removeprefix("models--").partition("--")
        revisions = _revisions(repository)
        for snapshot in sorted((repository / SNAPSHOTS).glob("*")):
            revision = revisions.get(snapshot.name, snapshot.name)
            yield from _models_in(snapshot, HubName(repo=f"{owner}/{repo}", revision=revision))


def _models_in(snapshot: Path, name: HubName) -> Iterator[PulledModel]:
    with contextlib.suppress(Failure):
        model = cached_model(name, snapshot)
        if model.kind == "safetensors":
            yield model
    for file in _files(snapshot):
        if file.path.endswith(".gguf") and not is_later_part(file.path):
            choice = HubName(repo=name.repo, revision=name.revision, choice=file.path)
            with contextlib.suppress(Failure):
                yield cached_model(choice, snapshot)


def _revisions(repository: Path) -> dict[str, str]:
    """Return commit -> branch or tag. If a commit has several, `main` takes precedence."""
    found = {}
    refs = repository / "refs"
    for file in sorted(refs.rglob("*"), key=lambda file: file == refs / MAIN):
        with contextlib.suppress(OSError, UnicodeError):
            commit = file.read_text().strip()
            if _COMMIT.fullmatch(commit):
                found[commit] = str(file.relative_to(refs))
    return found


def _files(snapshot: Path) -> list[RepoFile]:
    """Return the files of a snapshot. A link without content is skipped."""
    found = (path for path in sorted(snapshot.rglob("*")) if path.is_file())
    return [
        RepoFile(path=path.relative_to(snapshot).as_posix(), size=path.stat().st_size)
        for path in found
    ]
