"""Request bodies of the routes for files and batches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.shared.batches import BatchUrl
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400
"""Bounds of `expires_after`, as in OpenAI's API."""
MAX_METADATA = 16
Seconds = Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]
_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 86400


class FileUpload(msgspec.Struct, frozen=True):
    """A file to store, as a form (multipart/form-data).

    file     a JSONL file, one request per line; or an image
    purpose  batch; of an image, vision or user_data
    anchor   with the seconds, always created_at: from when they are counted
    seconds  after how many seconds the file is deleted. Default: --file-days
    """

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch", "vision", "user_data"]
    anchor: Literal["created_at"] | None = msgspec.field(name="expires_after[anchor]", default=None)
    seconds: Seconds | None = msgspec.field(name="expires_after[seconds]", default=None)


class ExpiresAfter(msgspec.Struct, frozen=True):
    """A time after which output files are deleted.

    anchor   always created_at: from when the seconds are counted
    seconds  after how many seconds the files are deleted
    """

    anchor: Literal["created_at"]
    seconds: Seconds


class BatchCreateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of an uploaded file to answer.

    input_file_id         id of the uploaded file
    completion_window     a number of minutes (m), hours (h) or days (d). Lines that have no answer
                          by then get an error as their result. Example: "24h"
    endpoint              the `url` of all lines
    metadata              pairs of texts that the batch repeats. Example: {"topic": "tides"}
    output_expires_after  when the output files are deleted. Default: --file-days
    """

    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: BatchUrl
    completion_window: Annotated[str, Meta(max_length=16)]
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=64)],
                Annotated[str, Meta(max_length=512)],
            ],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> float:
        """The window in seconds. Raises InvalidRequest if it is malformed or too long."""
        found = _WINDOW.fullmatch(self.completion_window)
        seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
        if not 0 < seconds <= MAX_WINDOW_S:
            words = "a time such as 24h, at most 30d (m, h or d)"
            raise InvalidRequest.wrong("completion_window", words, self.completion_window)
        return float(seconds)


def file_expiry_s(fields: Mapping[str, str]) -> float | None:
    """Return the seconds in the form fields of `expires_after`; None if they are absent. Raises
    InvalidRequest."""
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest.wrong("expires_after[anchor]", one_of(("created_at",)), anchor)
    text = seconds or ""
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S:
        words = f"a whole number from {MIN_EXPIRY_S:,} to {MAX_EXPIRY_S:,}"
        raise InvalidRequest.wrong("expires_after[seconds]", words, seconds)
    return float(text)
