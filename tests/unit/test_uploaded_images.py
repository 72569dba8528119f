"""Images by the id of an uploaded file: a caller finds only files of its own, and bounded ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from gateway.images.limits import MAX_IMAGE_BYTES
from gateway.images.source import ImageSource
from gateway.store.batch_database import BatchDatabase, TooMany
from gateway.store.batch_queries import NewFile
from gateway.store.sqlite_file import Store
from gateway.store.uploaded_images import UploadedImages
from protocol.wire.errors import InvalidImage

PIECE_BYTES = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store[BatchDatabase]]:
    path = str(tmp_path / "files.db")
    opened = partial(BatchDatabase, path, max_bytes=1 << 30, max_age_s=60.0)
    with closing(Store(opened, path, option="--file-store")) as store:
        yield store


def put(store: Store[BatchDatabase], name: str, owner: str, *pieces: bytes) -> None:
    now = time.time()

    def work(database: BatchDatabase) -> None:
        database.begin_file(NewFile(name, owner, "batch", name), 10, now)
        for number, piece in enumerate(pieces):
            database.add_piece(name, number, piece)
        assert database.finish_file(name, owner, now + 60, now, "vision") is not None

    store.call(work)


def why_not(images: UploadedImages, name: str) -> str:
    with pytest.raises(InvalidImage) as refused:
        images(ImageSource("here", file_id=name))
    assert refused.value.param == "here"
    return refused.value.message


def test_a_file_is_found_by_its_owner_only(store: Store[BatchDatabase]) -> None:
    put(store, "file-1", "alice", b"an ", b"image")
    assert UploadedImages(store, "alice")(ImageSource("here", file_id="file-1")) == b"an image"
    expected = 'here: must be the id of a stored file; got the text "{}"'
    assert why_not(UploadedImages(store, "bob"), "file-1") == expected.format("file-1")
    assert why_not(UploadedImages(store, "alice"), "file-2") == expected.format("file-2")


def test_a_file_that_is_too_large_is_refused(store: Store[BatchDatabase]) -> None:
    put(store, "file-1", "alice", *[bytes(PIECE_BYTES)] * (MAX_IMAGE_BYTES // PIECE_BYTES))
    images = UploadedImages(store, "alice")
    assert len(images(ImageSource("here", file_id="file-1"))) == MAX_IMAGE_BYTES
    put(store, "file-2", "alice", *[bytes(PIECE_BYTES)] * (MAX_IMAGE_BYTES // PIECE_BYTES), b"x")
    assert "more than" in why_not(images, "file-2")


def test_files_of_all_purposes_count_for_the_limit_of_a_key(store: Store[BatchDatabase]) -> None:
    for number in range(10):
        put(store, f"file-{number}", "alice", b"x")
    with pytest.raises(TooMany):
        put(store, "file-10", "alice", b"x")


def test_a_server_without_a_store_says_so() -> None:
    assert "stores no files" in why_not(UploadedImages(None, "alice"), "file-1")
