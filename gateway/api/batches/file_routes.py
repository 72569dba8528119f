"""The routes of files: upload, list, get, download and delete. The files of another owner are
reported as not found."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from flask import Response, request
from werkzeug.exceptions import RequestEntityTooLarge

from gateway.api.batches.requests import FileUpload, file_expiry_s
from gateway.api.batches.responses import FileDeleted, FileList, FileObject, file_list, file_object
from gateway.api.batches.uploads import read_upload
from gateway.api.openai.responses import ErrorAnswer
from gateway.context import RequestContext
from gateway.http.errors import NoSuchId
from gateway.http.query import choice, whole_number
from gateway.http.route import Parameter, Routes, json_response
from gateway.service import Service
from gateway.store.batch_database import (
    INPUT_PURPOSE,
    PURPOSES,
    BatchDatabase,
    FileInUse,
    StoreFull,
    TooMany,
    UnknownId,
    new_id,
)
from gateway.store.batch_queries import NewFile, StoredFile
from gateway.store.runs import DAY_S
from gateway.store.sqlite_file import Store
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_errors import REQUIRED
from protocol.wire.field_words import one_of

routes = Routes("Files and batches", ErrorAnswer, scope="inference")
ONE = "/v1/files/<file_id>"
ID = Parameter("file_id", "The id of a file.", place="path")
STORED = (400, 404, 405, 500, 503)
READ_BYTES = 1 << 19
"""Size of the pieces of a file that a download reads at a time, and holds if the client is slow."""
MAX_FORM_BYTES = 1 << 16
"""Size of a form besides its file."""
MAX_LIST = 10_000
T = TypeVar("T")


class _StoringSink:
    """Stores an uploaded file piece by piece. `file` is set when the file begins."""

    def __init__(self, store: Store[BatchDatabase], owner: str, max_files: int) -> None:
        self._store = store
        self._owner = owner
        self._max_files = max_files
        self._num_pieces = 0
        self.file: NewFile | None = None

    def begin(self, filename: str) -> None:
        file = NewFile(new_id("file-"), self._owner, INPUT_PURPOSE, filename)
        now = time.time()
        _stored(self._store, lambda database: database.begin_file(file, self._max_files, now))
        self.file = file

    def write(self, piece: bytes) -> None:
        assert self.file is not None
        name, number = self.file.id, self._num_pieces
        _stored(self._store, lambda database: database.add_piece(name, number, piece))
        self._num_pieces += 1

    def abandon(self) -> None:
        if (file := self.file) is not None:
            with contextlib.suppress(sqlite3.OperationalError):  # it is deleted after UPLOAD_S
                self._store.call(lambda database: database.abandon_file(file.id))


def _stored(store: Store[BatchDatabase], work: Callable[[BatchDatabase], T]) -> T:
    """Run an operation of an upload. Turn mistakes of the client into errors of the request."""
    try:
        return store.call(work)
    except TooMany as error:
        raise InvalidRequest.at(
            "file", f"at most {error.limit:,} files; delete some (see --files-per-key)"
        ) from None
    except UnknownId:
        raise InvalidRequest("the upload took too long") from None


@routes.post(
    "/v1/files",
    about="Upload the input file of a batch, or an image.",
    takes=(FileUpload,),
    takes_type="multipart/form-data",
    gives=FileObject,
    statuses=(400, 404, 405, 408, 413, 415, 500, 503),
)
def upload(service: Service, context: RequestContext) -> Response:
    store = file_store(service)
    max_bytes = service.config.file_max_mib << 20
    if (request.content_length or 0) > max_bytes + MAX_FORM_BYTES:
        raise RequestEntityTooLarge(f"the file is larger than {max_bytes:,} bytes")
    sink = _StoringSink(store, context.caller.owner, service.config.files_per_key)
    with refuse_if_full(), contextlib.ExitStack() as on_failure:
        on_failure.callback(sink.abandon)
        fields = read_upload(request.stream, request.content_type or "", max_bytes, sink)
        purpose = fields.get("purpose")
        if purpose is None:
            raise InvalidRequest.at("purpose", REQUIRED)
        if purpose not in PURPOSES:
            raise InvalidRequest.wrong("purpose", one_of(PURPOSES), purpose)
        expiry_s = file_expiry_s(fields)
        assert sink.file is not None
        kept_s = service.config.file_days * DAY_S if expiry_s is None else expiry_s
        name, owner, now = sink.file.id, sink.file.owner, time.time()
        file = store.call(
            lambda database: database.finish_file(name, owner, now + kept_s, now, purpose)
        )
        if file is None:
            raise InvalidRequest("the upload took too long")
        on_failure.pop_all()
    return json_response(file_object(file))


_INT = {"type": "integer", "minimum": 1, "maximum": MAX_LIST}


@routes.get(
    "/v1/files",
    about="List the files.",
    gives=FileList,
    statuses=STORED,
    parameters=(
        Parameter("purpose", "`batch`, `vision`, `user_data` or `batch_output`; by default all."),
        Parameter(
            "order",
            "By creation; `desc`, the default: the newest first.",
            schema={"enum": ["asc", "desc"]},
        ),
        Parameter("limit", f"Maximum number of files; by default {MAX_LIST:,}.", schema=_INT),
        Parameter("after", "List the files after this id."),
    ),
)
def files(service: Service, context: RequestContext) -> Response:
    store = file_store(service)
    order = choice("order", ("asc", "desc"), default="desc")
    limit = whole_number("limit", default=MAX_LIST, least=1, most=MAX_LIST)
    after, purpose = request.args.get("after"), request.args.get("purpose", "")
    owner, now = context.caller.owner, time.time()
    found = listed(
        store,
        lambda database: database.list_files(
            owner, after, purpose, limit + 1, now, ascending=order == "asc"
        ),
    )
    return json_response(file_list(found, limit))


@routes.get(ONE, about="Describe a file.", gives=FileObject, statuses=STORED, parameters=(ID,))
def read(service: Service, context: RequestContext, file_id: str) -> Response:
    return json_response(file_object(_file(service, context, file_id)))


@routes.get(
    f"{ONE}/content",
    about="Download a file.",
    text_types=("application/octet-stream",),
    statuses=STORED,
    parameters=(ID,),
)
def content(service: Service, context: RequestContext, file_id: str) -> Response:
    file = _file(service, context, file_id)
    response = Response(_pieces(file_store(service), file), content_type="application/octet-stream")
    response.content_length = file.bytes
    return response


def _pieces(store: Store[BatchDatabase], file: StoredFile) -> Iterator[bytes]:
    after = -1
    while found := store.call(partial(_some_pieces, file.id, after)):
        after = found[-1][0]
        yield from (data for _, data in found)


def _some_pieces(file: str, after: int, database: BatchDatabase) -> list[tuple[int, bytes]]:
    return database.pieces(file, after, READ_BYTES)


@routes.delete(
    ONE,
    about="Delete a file.\nThe input file of a batch can be deleted when the batch has ended.",
    gives=FileDeleted,
    statuses=STORED,
    parameters=(ID,),
)
def delete(service: Service, context: RequestContext, file_id: str) -> Response:
    store = file_store(service)
    owner, now = context.caller.owner, time.time()
    try:
        with refuse_if_full():
            was_there = store.call(lambda database: database.delete_file(file_id, owner, now))
    except FileInUse as error:
        raise InvalidRequest.at(
            "file_id", f"the batch {error.batch} reads this file; cancel it first"
        ) from None
    if not was_there:
        raise NoSuchId.of("file_id", "the id of a stored file", file_id)
    return json_response(FileDeleted(file_id, "file", deleted=True))


@contextlib.contextmanager
def refuse_if_full() -> Iterator[None]:
    """Refuse the request (413) if the `with` block finds no room in the store."""
    try:
        yield
    except StoreFull:
        message = "the file store is full; delete files (see --file-store-mib)"
        raise RequestEntityTooLarge(message) from None


def file_store(service: Service) -> Store[BatchDatabase]:
    if service.files is None:
        raise NoSuchId("this server stores no files (see --file-store)")
    return service.files


def _file(service: Service, context: RequestContext, file_id: str) -> StoredFile:
    owner, now = context.caller.owner, time.time()
    file = file_store(service).call(lambda database: database.get_file(file_id, owner, now))
    if file is None:
        raise NoSuchId.of("file_id", "the id of a stored file", file_id)
    return file


def listed(store: Store[BatchDatabase], work: Callable[[BatchDatabase], T]) -> T:
    """Run an operation that lists files or batches. Raises InvalidRequest if `after` is unknown."""
    try:
        return store.call(work)
    except UnknownId:
        raise InvalidRequest.at("after", "nothing in this list has this id") from None
