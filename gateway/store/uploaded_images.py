"""The images that requests name by the id of an uploaded file."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gateway.images.limits import MAX_IMAGE_BYTES
from gateway.images.source import ImageSource, too_large
from gateway.store.batch_database import BatchDatabase
from gateway.store.sqlite_file import Store
from protocol.wire.errors import InvalidImage


@dataclass(frozen=True, slots=True)
class UploadedImages:
    """Loads the files of one caller. It is a `FileLoader`.

    store  None: this server stores no files
    owner  the files of others are not found
    """

    store: Store[BatchDatabase] | None
    owner: str

    def __call__(self, source: ImageSource) -> bytes:
        """Return the bytes of a file. Raises InvalidImage, naming the field, and StoreUnusable."""
        if self.store is None:
            raise InvalidImage.at(
                source.param, "this server stores no files (see --file-store); send a data: URL"
            )
        name, owner, now = source.file_id, self.owner, time.time()
        file = self.store.call(lambda database: database.get_file(name, owner, now))
        if file is None:
            raise InvalidImage.wrong(source.param, "the id of a stored file", name)
        if file.bytes > MAX_IMAGE_BYTES:
            raise too_large(source.param)
        pieces = self.store.call(lambda database: database.pieces(name, -1, MAX_IMAGE_BYTES))
        return b"".join(data for _, data in pieces)
