"""What MODEL may be, and when a cached file is believed."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from tools.commands.models import resolve
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT, Entry
from tools.models.fetch import cached_file, fetch, home, is_cached

CONTENT = b"GGUF and some weights"
SMALL = dataclasses.replace(
    CATALOGUE[DEFAULT],
    name="small",
    file_bytes=len(CONTENT),
    file_sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def cached(entry: Entry, cache: Path) -> Path:
    """The file in place and verified, as after a fetch."""
    file = cached_file(entry, cache)
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    assert fetch(entry, cache) == file
    return file


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_every_entry_says_what_its_bytes_must_be(entry: Entry) -> None:
    for digest in (entry.wheel_sha256, entry.file_sha256):
        assert len(bytes.fromhex(digest)) == hashlib.sha256().digest_size
    assert CATALOGUE[entry.name] is entry
    assert entry.file.endswith(".gguf")
    assert entry.licence


def test_the_default_model_is_in_the_catalogue() -> None:
    assert DEFAULT in CATALOGUE


def test_the_cache_is_where_the_environment_says() -> None:
    assert home({"TIDEGATE_HOME": "/data/tide"}) == Path("/data/tide")
    assert home({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/tidegate")
    assert home({}) == Path.home() / ".cache" / "tidegate"


def test_a_right_file_without_a_stamp_is_hashed_once_and_kept(tmp_path: Path) -> None:
    file = cached_file(SMALL, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    assert not is_cached(SMALL, tmp_path)
    assert fetch(SMALL, tmp_path) == file
    assert is_cached(SMALL, tmp_path)


def test_a_file_that_changed_is_not_believed(tmp_path: Path) -> None:
    file = cached(SMALL, tmp_path)
    file.write_bytes(CONTENT[::-1])
    assert not is_cached(SMALL, tmp_path)


def test_a_file_of_another_release_is_not_believed(tmp_path: Path) -> None:
    cached(SMALL, tmp_path)
    newer = dataclasses.replace(SMALL, file_sha256=hashlib.sha256(b"newer").hexdigest())
    assert not is_cached(newer, tmp_path)


def test_a_local_path_is_a_model_if_it_looks_like_one(tmp_path: Path) -> None:
    gguf, folder = tmp_path / "m.gguf", tmp_path / "hf"
    gguf.write_bytes(CONTENT)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(gguf), tmp_path) == gguf
    assert resolve(str(folder), tmp_path) == folder


def test_what_is_no_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for name, words in (
        ("qwen9-900b", DEFAULT),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "notes.txt"), "neither a .gguf file"),
    ):
        with pytest.raises(Failure, match=words):
            resolve(name, tmp_path)
