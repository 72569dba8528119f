"""Response bodies of the routes for files and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gateway.store.batch_queries import StoredBatch, StoredFile
from gateway.store.batch_states import BatchStatus


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file. Times are seconds since 1970."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None = None


class FileList(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchProblem(msgspec.Struct, frozen=True):
    """Why a batch failed, or pauses. `line` is the number of a line of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


PAUSED = BatchProblem(
    "file_store_full",
    "the file store is full (--file-store-mib). The batch continues when there is room: delete "
    "files, or cancel batches and delete their files",
)


class BatchProblems(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(msgspec.Struct, frozen=True):
    """Numbers of lines. `total` is 0 until they are checked."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds since 1970, and null for statuses that it has not had.

    output_file_id, error_file_id  files with the results; null while the batch is open, or if there
                                   are no such results
    """

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        object="file",
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=None if file.expires_at is None else int(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
    )


def file_list(files: Sequence[StoredFile], limit: int) -> FileList:
    """Return a page of at most `limit` files. More pages follow if `files` has more."""
    page = [file_object(each) for each in files[:limit]]
    return FileList("list", page, *_ends(page), len(files) > limit)


def batch_object(batch: StoredBatch) -> BatchObject:
    times: dict[str, float] = msgspec.json.decode(batch.changed_at)
    errors: list[BatchProblem] | None = None
    if batch.is_paused:
        errors = [PAUSED]
    if batch.errors is not None:
        errors = msgspec.json.decode(batch.errors, type=list[BatchProblem])

    def at(status: BatchStatus) -> int | None:
        return int(times[status]) if status in times else None

    return BatchObject(
        id=batch.id,
        object="batch",
        endpoint=batch.endpoint,
        errors=None if errors is None else BatchProblems("list", errors),
        input_file_id=batch.input_file,
        completion_window=batch.window,
        status=batch.status,
        output_file_id=batch.output_file if batch.has_output else None,
        error_file_id=batch.error_file if batch.has_errors else None,
        created_at=int(batch.created_at),
        in_progress_at=at(BatchStatus.IN_PROGRESS),
        expires_at=int(batch.expires_at),
        finalizing_at=at(BatchStatus.FINALIZING),
        completed_at=at(BatchStatus.COMPLETED),
        failed_at=at(BatchStatus.FAILED),
        expired_at=at(BatchStatus.EXPIRED),
        cancelling_at=at(BatchStatus.CANCELLING),
        cancelled_at=at(BatchStatus.CANCELLED),
        request_counts=RequestCounts(batch.num_total, batch.num_completed, batch.num_failed),
        metadata=msgspec.json.decode(batch.metadata, type=dict[str, str] | None),
    )


def batch_list(batches: Sequence[StoredBatch], limit: int) -> BatchList:
    """Return a page of at most `limit` batches. More pages follow if `batches` has more."""
    page = [batch_object(each) for each in batches[:limit]]
    return BatchList("list", page, *_ends(page), len(batches) > limit)


def _ends(page: Sequence[Any]) -> tuple[str | None, str | None]:
    return (page[0].id, page[-1].id) if page else (None, None)
