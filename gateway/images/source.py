"""Where the bytes of an image come from, as a request says it.

A request's content part becomes an `ImageSource`, with the path of the field, so that errors of
every API name the field as the client wrote it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.images.limits import (
    MAX_FILE_ID_CHARS,
    MAX_IMAGE_BYTES,
    MAX_URL_CHARS,
    MEDIA_TYPES,
)
from protocol.wire.errors import InvalidImage
from protocol.wire.field_words import one_of

IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of content parts that are images, in OpenAI's spellings and that of transformers."""
DETAILS = ("auto", "low", "high", "original")
"""Values of `detail`, which has no effect: the model's own settings decide about the resolution."""
_DATA = "data:"
_BLANKS = b" \t\n\r\v\f"
_MAX_HEAD_CHARS = 512
"""Most characters of a data: URL before its content."""
_PIECE_CHARS = 1 << 18
"""Characters that are decoded at a time. Other threads run in between."""


NOTE = "[image left out: this model reads text only]"
"""The text that replaces an image in a tool's result, if the model reads no images: the user cannot
change what a tool returns."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request, not loaded yet. `base64`, `url`, `file_id`, `data` or `problem` is
    set."""

    #: Path of the field, for errors.
    param: str
    #: Bytes in base64.
    base64: str = ""
    #: `data:`, `http:` or `https:`.
    url: str = ""
    #: Id of an uploaded file.
    file_id: str = ""
    #: Bytes that are loaded already.
    data: bytes = b""
    #: Why the image cannot be loaded. A model that reads no images has another error, or none.
    problem: InvalidImage | None = None
    #: The field and the value that a model without images refuses; "": `param` itself. With a
    #: note, the part that is left out.
    kind_at: str = ""
    kind: str = ""
    #: The text that replaces the image if the model reads none; "": it is then an error.
    note: str = ""

    def refusal(self, why: str) -> InvalidImage:
        """Return the error of a model that reads no images, for the reason `why`."""
        if not self.kind:
            return InvalidImage.at(self.kind_at or self.param, why)
        return InvalidImage.wrong(self.kind_at, f"{one_of(('text',))}, because {why}", self.kind)


def is_image(part: Any) -> bool:
    """Return whether a content part is an image."""
    if isinstance(part, ImageSource):
        return True
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in IMAGE_PARTS or (kind is None and "image_url" in part)


def source_of(part: Any, at: str) -> ImageSource:
    """Return the source of a content part that `is_image`.

    at  path of the part
    """
    if isinstance(part, ImageSource):
        return part
    return deferred(lambda: _checked_source(part, at), at)


def deferred(make: Callable[[], ImageSource], param: str) -> ImageSource:
    """Return what `make` returns, or a source with the error that it raises as its problem."""
    try:
        return make()
    except InvalidImage as error:
        return ImageSource(param, problem=error)


def _checked_source(part: Mapping[str, Any], at: str) -> ImageSource:
    """Return the source of a content part. Raises InvalidImage."""
    if "image_url" in part and part["image_url"] is not None:
        return _of_image_url(part, at)
    if part.get("file_id") is not None:
        return file_source(part["file_id"], f"{at}.file_id")
    for name in ("url", "image"):
        if part.get(name) is not None:
            text = _text(part[name], f"{at}.{name}")
            return url_source(text, f"{at}.{name}")
    if part.get("base64") is not None:
        text = _text(part["base64"], f"{at}.base64")
        return ImageSource(f"{at}.base64", base64=text)
    raise InvalidImage.at(f"{at}.image_url", "is required: a data: URL, or an http(s): URL")


def _of_image_url(part: Mapping[str, Any], at: str) -> ImageSource:
    """Return the source of a part with `image_url`, which is an object in the chat API and a string
    in the Responses API. Both are accepted in both."""
    value, path = part["image_url"], f"{at}.image_url"
    detail, detail_at = part.get("detail"), f"{at}.detail"
    if isinstance(value, Mapping):
        detail, detail_at = value.get("detail", detail), f"{path}.detail"
        value, path = value.get("url"), f"{path}.url"
    if detail is not None and detail not in DETAILS:
        raise InvalidImage.wrong(detail_at, one_of(DETAILS), detail)
    return url_source(_text(value, path), path)


def url_source(url: str, param: str) -> ImageSource:
    """Return the source of an image with this URL. `param` is the path of the URL. Raises
    InvalidImage if it has another scheme."""
    scheme = url[:8].lower()
    if scheme.startswith("http") and len(url) > MAX_URL_CHARS:
        raise InvalidImage.at(param, f"the URL has more than {MAX_URL_CHARS:,} characters")
    if not scheme.startswith((_DATA, "http://", "https://")):
        raise InvalidImage.at(
            param, "must be a data: URL with the image in base64, or an http(s): URL"
        )
    return ImageSource(param, url=url)


FileLoader = Callable[[ImageSource], bytes]
"""Returns the bytes of an image with a file id. Raises InvalidImage, naming the field."""


def no_files(source: ImageSource) -> bytes:
    """Refuse an image with a file id. The FileLoader of a request without a caller."""
    raise InvalidImage.at(source.param, "no uploaded files are read here; send a data: URL")


def file_source(value: Any, param: str) -> ImageSource:
    """Return the source of an image that is an uploaded file. Raises InvalidImage if its id is not
    a string."""
    name = _text(value, param)
    if not 0 < len(name) <= MAX_FILE_ID_CHARS:
        raise InvalidImage.wrong(param, "the id of a stored file", name)
    return ImageSource(param, file_id=name)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidImage.wrong(param, "a string", value)
    return value


def check_media_type(media_type: Any, param: str) -> None:
    """Raise InvalidImage if a media type is not that of a supported format. The bytes decide
    which of the formats an image has."""
    kind = media_type.partition(";")[0].strip().lower() if isinstance(media_type, str) else None
    if kind not in (*MEDIA_TYPES, "image/jpg", "image/x-ms-bmp"):
        raise InvalidImage.wrong(param, one_of(MEDIA_TYPES), media_type)


def decoded_bytes(source: ImageSource) -> bytes:
    """Return the bytes of an image whose source holds them. Raises InvalidImage."""
    if source.data:
        return source.data
    text = source.base64
    if source.url:
        comma = source.url.find(",", 0, _MAX_HEAD_CHARS)
        media_type, *options = source.url[len(_DATA) : max(comma, 0)].split(";")
        text = source.url[comma + 1 :]
        if not options or options[-1].strip().lower() != "base64":
            raise InvalidImage.at(
                source.param, "a data: URL must be data:<media type>;base64,<image in base64>"
            )
        check_media_type(media_type, source.param)
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 1024:
        raise too_large(source.param)
    try:
        data = from_base64(text)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise InvalidImage.at(source.param, f"not valid base64: {_why(error)}") from None
    if not data:
        raise InvalidImage.at(source.param, "the image has no bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(source.param)
    return data


def from_base64(text: str) -> bytes:
    """Return the bytes of a text in base64, which may have blanks. Raises binascii.Error or
    UnicodeEncodeError."""
    found: list[bytes] = []
    rest, has_ended = b"", False
    for at in range(0, len(text), _PIECE_CHARS):
        letters = rest + text[at : at + _PIECE_CHARS].encode("ascii").translate(None, _BLANKS)
        if letters and has_ended:
            raise binascii.Error("Excess data after padding")
        end = len(letters) // 4 * 4
        found.append(base64.b64decode(letters[:end], validate=True))
        rest, has_ended = letters[end:], has_ended or len(found[-1]) < end // 4 * 3
    if rest and has_ended:
        raise binascii.Error("Excess data after padding")
    found.append(base64.b64decode(rest, validate=True))
    return b"".join(found)


def _why(error: Exception) -> str:
    return "not ASCII" if isinstance(error, UnicodeEncodeError) else str(error)


def too_large(param: str) -> InvalidImage:
    """Return the error of an image file with too many bytes."""
    return InvalidImage.at(param, f"the image has more than {MAX_IMAGE_BYTES:,} bytes")
