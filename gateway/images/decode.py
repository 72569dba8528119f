"""Decodes an image with Pillow. Only the sandbox process imports this module.

The size that the header of a file declares is checked before any pixel is decoded, so a small file
cannot demand much memory. Of an animation, only the first frame is decoded.
"""

from __future__ import annotations

from io import BytesIO

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from gateway.images.limits import FORMATS, MAX_PIXELS, MAX_SIDE

_ORIENTATION = 0x0112
"""The number of the EXIF tag that says how a camera was held."""
_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Value of the tag -> the change that turns the image upright."""
_DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Modes of greyscale images of 16 bits. Pillow would clip their values at 255."""
_METADATA_BYTES = 16 << 20
"""Most bytes of compressed metadata of a PNG, such as a colour profile, which is ignored."""


class BadImage(ValueError):
    """Raised if bytes are not an image that is accepted. The message says why."""


def decoded(data: bytes) -> Image.Image:
    """Return an image in RGB, upright. Raises BadImage; MemoryError if the decoder needs too much
    memory."""
    Image.MAX_IMAGE_PIXELS = None  # the size is checked here, with an error and not a warning
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = _METADATA_BYTES
    if (size := _webp_size(data)) is not None:  # Pillow allocates a WebP's canvas when it opens it
        _check_size(*size)
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise anything for damaged files
        names = ", ".join(FORMATS[:-1])
        why = f"not an image in a supported format ({names} or {FORMATS[-1]})"
        detail = "" if isinstance(error, UnidentifiedImageError) else f": {error}"
        raise BadImage(why + detail) from None
    _check_size(*image.size)
    try:
        image.load()
        return _in_rgb(_upright(image))
    except MemoryError:
        raise
    except Exception as error:
        raise BadImage(f"the {image.format} cannot be decoded: {error}") from None


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise BadImage(f"an image of {width} x {height} pixels is empty")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise BadImage(
            f"{width:,} x {height:,} pixels are too many; at most {MAX_PIXELS:,} pixels and "
            f"{MAX_SIDE:,} pixels on a side are decoded; send a smaller image"
        )


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Return the width and height in the header of a WebP; None if it is none, or damaged."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    match data[12:16]:
        case b"VP8X":
            return _number(data[24:27]) + 1, _number(data[27:30]) + 1
        case b"VP8L":
            bits = _number(data[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return _number(data[26:28]) & 0x3FFF, _number(data[28:30]) & 0x3FFF
    return None


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _upright(image: Image.Image) -> Image.Image:
    """Return the image as the camera saw it. Damaged EXIF data are ignored."""
    try:
        value = image.getexif().get(_ORIENTATION)
    except Exception:  # the parser raises anything for damaged data
        value = None
    method = _TRANSPOSED.get(value) if isinstance(value, int) else None
    return image if method is None else image.transpose(method)


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _DEEP_MODES:
        image = image.convert("I").point(lambda level: level * (1 / 257)).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")
