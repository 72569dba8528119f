"""Which files of the caches go when a client deletes a model, and which stay."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub.constants
import pytest

from protocol.config.worker import WorkerConfig
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE
from tools.models.download import PARTIAL
from tools.models.fetch import locked
from tools.models.hub_cache import repository_lock
from tools.models.records import PulledFile, PulledModel, read_record, write_record
from tools.models.stored import files_in_use
from tools.processes.model_job import RemoveOrder, remove
from tools.processes.saved_models import loaded_paths

REPO = "owner/repo"
TAGGED = f"{REPO}@v1"


class Caches:
    """The caches of a user, with models of small files."""

    def __init__(self, folder: Path) -> None:
        self.home, self.hub = folder / "tidegate", folder / "hub"
        self.repository = self.hub / "models--owner--repo"

    def add(self, name: str, commit: str, **contents: str) -> Path:
        """Store a model as `tidegate pull` does, and return its directory. Equal contents are
        stored once."""
        blobs, snapshot = self.repository / "blobs", self.repository / "snapshots" / commit
        blobs.mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True)
        for file, content in contents.items():
            (blobs / content).write_text(content)
            (snapshot / file).symlink_to(f"../../blobs/{content}")
        files = [PulledFile(str(snapshot / file), len(text)) for file, text in contents.items()]
        model = PulledModel(name=name, kind="safetensors", path=str(snapshot), files=files)
        write_record(self.home, model)
        return snapshot

    def has(self, name: str) -> bool:
        return read_record(self.home, name) is not None


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    found = Caches(tmp_path)
    monkeypatch.setenv("TIDEGATE_HOME", str(found.home))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(found.hub))
    monkeypatch.chdir(tmp_path)
    return found


def test_other_revisions_stay_whether_or_not_they_are_served(caches: Caches) -> None:
    newest = caches.add(REPO, "a" * 40, weights="new", tokens="same")
    tagged = caches.add(TAGGED, "b" * 40, weights="older", tokens="same")
    assert remove(RemoveOrder(model=REPO)).freed_bytes == len("new")
    assert not newest.exists()
    assert (tagged / "tokens").read_text() == "same"
    assert caches.has(TAGGED)


def test_only_the_exact_name_is_removed(caches: Caches) -> None:
    caches.add(TAGGED, "b" * 40, weights="older")
    for name in (REPO, "weights", f"{REPO}@v"):
        with pytest.raises(Failure, match="not in the cache"):
            remove(RemoveOrder(model=name))
    assert caches.has(TAGGED)


@pytest.mark.parametrize("spelling", ["absolute", "relative", "link", "links to its files"])
def test_a_model_that_is_served_from_the_same_directory_stays(
    spelling: str, caches: Caches, tmp_path: Path
) -> None:
    snapshot = caches.add(REPO, "a" * 40, weights="new", tokens="same")
    path = {"absolute": str(snapshot), "relative": os.path.relpath(snapshot)}.get(spelling)
    if path is None:
        path = str(tmp_path / "link")
        if spelling == "link":
            Path(path).symlink_to(snapshot)
        else:
            Path(path).mkdir()
            for file in snapshot.iterdir():
                Path(path, file.name).symlink_to(file)
    assert remove(RemoveOrder(model=REPO, in_use=[path])).freed_bytes == 0
    assert caches.has(REPO)
    assert (Path(path) / "weights").read_text() == "new"
    assert remove(RemoveOrder(model=REPO)).freed_bytes == len("newsame")
    assert not caches.repository.exists()


def test_content_that_is_served_itself_stays_without_its_names(caches: Caches) -> None:
    snapshot = caches.add(REPO, "a" * 40, weights="new", tokens="same")
    content = (snapshot / "weights").resolve()
    assert remove(RemoveOrder(model=REPO, in_use=[str(content)])).freed_bytes == len("same")
    assert content.read_text() == "new"
    assert not snapshot.exists()


def test_a_file_of_the_catalogue_that_is_served_by_its_path_stays(caches: Caches) -> None:
    entry = next(iter(CATALOGUE.values()))
    file = caches.home / "file.gguf"
    file.parent.mkdir(parents=True)
    file.write_text("gguf")
    model = PulledModel(
        name=entry.name, kind="GGUF", path=str(file), files=[PulledFile(str(file), 4)]
    )
    write_record(caches.home, model)
    assert remove(RemoveOrder(model=entry.name, in_use=[str(file)])).freed_bytes == 0
    assert file.exists()
    assert remove(RemoveOrder(model=entry.name)).freed_bytes == 4
    assert not file.exists()


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_partial_files_stay_while_another_process_downloads_from_the_repository(
    has_snapshot: bool, caches: Caches
) -> None:
    if has_snapshot:
        caches.add(REPO, "a" * 40, weights="new")
    partial = caches.repository / "blobs" / f"digest{PARTIAL}"
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    order = RemoveOrder(model=f"{REPO}:Q4_0", is_partial=True)
    lock = repository_lock(caches.home, REPO)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, REPO, print):
        remove(order)
        assert partial.exists()
    remove(order)
    assert not partial.exists()
    assert caches.has(REPO) == has_snapshot


def test_an_image_encoder_beside_a_file_that_is_served_stays(caches: Caches) -> None:
    snapshot = caches.add(REPO, "a" * 40, **{"m.gguf": "model", "mmproj-F16.gguf": "encoder"})
    order = RemoveOrder(model=REPO, in_use=[str(snapshot / "m.gguf")])
    assert remove(order).freed_bytes == 0
    assert (snapshot / "mmproj-F16.gguf").read_text() == "encoder"
    assert caches.has(REPO)


def test_all_parts_of_a_gguf_model_are_in_use(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.touch()
    assert files_in_use([str(parts[0]), str(tmp_path / "missing")]) == set(parts)


def test_encoders_drafts_and_adapters_are_loaded_too() -> None:
    worker = WorkerConfig(
        model="/m", mmproj="/e", draft_model="/d", lora=["a=/a", "b=/b"], lora_dir="/more"
    )
    assert loaded_paths(worker) == ["/m", "/e", "/d", "/a", "/b", "/more"]
    assert loaded_paths(WorkerConfig(model="/m", mmproj="none")) == ["/m"]
