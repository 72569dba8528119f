"""Marks images in a conversation, and finds their placeholders in the prompt.

A mark is text, so that images keep their places while a conversation is brought into the form that
a template needs. The template's own marker follows when each mark has become a content part, or
else when the prompt is complete. Only images of the request become images of the prompt: markers
in a client's text are split before the template renders them, and joined again afterwards.

Marks contain a random number, so no client can write one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.images.families import ImageText
from gateway.images.limits import MAX_IMAGES
from gateway.images.source import ImageSource, is_image, source_of
from protocol.engine.attachments import Attachment
from protocol.wire.errors import InvalidImage, InvalidRequest


@dataclass(frozen=True, slots=True)
class MarkedImages:
    """The images of a conversation in their order, and the conversation with a mark in place of
    each of them."""

    messages: Sequence[Any]
    sources: Sequence[ImageSource]
    #: The text that stands for an image.
    mark: str

    def without_images(self) -> Sequence[Any]:
        """Return the messages with the notes of the images in place of their marks."""
        notes = iter(self.sources)

        def noted(part: Any) -> Any:
            is_mark = isinstance(part, Mapping) and part.get("text") == self.mark
            return {"type": "text", "text": next(notes).note} if is_mark else part

        return [
            {**message, "content": [noted(part) for part in _parts(message)]}
            if _parts(message)
            else message
            for message in self.messages
        ]

    def guarded(self, value: Any, marker: str) -> Any:
        """Return decoded JSON in which each `marker` in a client's text is split, so that it does
        not count as an image."""
        if isinstance(value, str):
            return value.replace(marker, self._split(marker)) if marker in value else value
        if isinstance(value, Mapping):
            return {key: self.guarded(each, marker) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(each, marker) for each in value]
        return value

    def joined(self, text: str, marker: str) -> str:
        """Return a text with the markers that `guarded` has split."""
        return text.replace(self._split(marker), marker)

    def _split(self, marker: str) -> str:
        middle = len(marker) // 2
        return f"{marker[:middle]}{self.mark[::-1]}{marker[middle:]}"


def marked_images(messages: Sequence[Any], param: str, *, reads_parts: bool) -> MarkedImages | None:
    """Return the images of a conversation; None if it has none.

    messages     decoded JSON, unchecked, with an ImageSource for each image that another API's
                 translation has found
    param        path of the messages in the request
    reads_parts  whether content parts of the chat API may be images; otherwise they stay as they
                 are

    Raises InvalidRequest, naming the field, if an image is malformed or if there are too many.
    """

    def is_found(part: Any) -> bool:
        return isinstance(part, ImageSource) or (reads_parts and is_image(part))

    if not any(is_found(part) for message in messages for part in _parts(message)):
        return None
    mark = f"(image-{secrets.token_hex(16)})"
    sources: list[ImageSource] = []

    def marked_message(message: Any, at: str) -> Any:
        parts = _parts(message)
        if not any(map(is_found, parts)):
            return message
        _check_role(message, at)
        content = []
        for place, part in enumerate(parts):
            if is_found(part):
                source = source_of(part, f"{at}.content[{place}]")
                if len(sources) == MAX_IMAGES:
                    raise InvalidImage.at(
                        source.param, f"a request has at most {MAX_IMAGES} images"
                    )
                sources.append(source)
                part = {"type": "text", "text": mark}
            content.append(part)
        return {**message, "content": content}

    marked = [marked_message(message, f"{param}[{i}]") for i, message in enumerate(messages)]
    return MarkedImages(marked, sources, mark)


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _check_role(message: Mapping[str, Any], at: str) -> None:
    if message.get("role") == "assistant":
        raise InvalidRequest.at(
            f"{at}.content", "a message of the assistant cannot contain an image"
        )


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """A prompt with the text of its images."""

    text: str
    #: For each placeholder in the text, in order: the place of its image in the conversation, or
    #: None if a client has written it as text.
    owners: Sequence[int | None]
    texts: Sequence[ImageText]

    def attachments(
        self, ids: Sequence[int], pad_id: int, digests: Sequence[str]
    ) -> list[Attachment]:
        """Return the position of each image in the prompt.

        ids      the prompt's tokens
        pad_id   the placeholder's id
        digests  the digest of each image

        Raises ValueError if the tokens do not have the placeholders of the text.
        """
        runs = self._runs(ids, pad_id)
        return [
            Attachment(digest=digest, kind="image", runs=runs.get(place, []), grid=text.grid)
            for place, (digest, text) in enumerate(zip(digests, self.texts, strict=True))
        ]

    def _runs(self, ids: Sequence[int], pad_id: int) -> dict[int, list[tuple[int, int]]]:
        """Return the runs of placeholders of each image: (first position, number of positions)."""
        found: dict[int, list[tuple[int, int]]] = {}
        positions = [place for place, each in enumerate(ids) if each == pad_id]
        for place, owner in zip(positions, self.owners, strict=True):
            if owner is None:
                continue
            runs = found.setdefault(owner, [])
            if runs and sum(runs[-1]) == place:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((place, 1))
        return found


def placed_images(
    text: str, texts: Sequence[ImageText], marks: MarkedImages, *, marker: str, pad: str
) -> PlacedImages:
    """Replace the markers that a template has written with the texts of the images.

    text    the template's output, with guarded texts of the client
    texts   the text of each image
    marker  what the template writes for an image
    pad     the placeholder

    Raises ValueError, with the number of markers, if it is not the number of images.
    """
    pieces = text.split(marker)
    if len(pieces) != len(texts) + 1:
        raise ValueError(
            f"the model's chat template places {len(pieces) - 1} of {len(texts)} images"
        )
    written: list[str] = []
    owners: list[int | None] = []
    for place, piece in enumerate(pieces):
        if place:
            image = texts[place - 1].text
            written.append(image)
            owners += [place - 1] * image.count(pad)
        restored = marks.joined(piece, marker)
        written.append(restored)
        owners += [None] * restored.count(pad)
    return PlacedImages("".join(written), owners, texts)


def split_at(mark: str, text: str) -> Sequence[str]:
    """Return the parts of a text at marks, the marks included, without empty parts."""
    return [part for part in re.split(f"({re.escape(mark)})", text) if part]
