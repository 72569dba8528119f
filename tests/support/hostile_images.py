"""Files that pretend to be images: small files that would need much memory or time, and damaged
ones. Files that are made differently have different digests, so none is in a cache.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from io import BytesIO

from PIL import Image, PngImagePlugin

from gateway.images.limits import MAX_PIXELS
from tests.support.image_models import picture

PNG = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, colours: int = _RGB) -> bytes:
    return PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0))


def black_png(width: int, height: int, *, number: int = 0, rows: int | None = None) -> bytes:
    """Return a black PNG in grey, a thousand times smaller than its pixels.

    number  makes its bytes differ from those of others
    rows    rows whose pixels are there; None: all
    """
    compressor = zlib.compressobj(9)
    row = bytes(1 + width)
    data = b"".join(compressor.compress(row) for _ in range(height if rows is None else rows))
    pixels = chunk(b"IDAT", data + compressor.flush())
    text = chunk(b"tEXt", b"number\0" + str(number).encode())
    return png_header(width, height, _GREY) + text + pixels + chunk(b"IEND")


def webp_canvas(side: int) -> bytes:
    """Return the header of a WebP with this canvas. Pillow allocates it before it decodes."""
    size = (side - 1).to_bytes(3, "little")
    head = b"VP8X" + struct.pack("<I", 10) + bytes(4) + size + size
    return b"RIFF" + struct.pack("<I", 4 + len(head)) + b"WEBP" + head


def animation(num_frames: int, kind: str = "GIF", side: int = 64) -> bytes:
    frames = [Image.new("RGB", (side, side), (each % 256, 0, 0)) for each in range(num_frames)]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:])


def gif_canvas(side: int) -> bytes:
    """Return a GIF of a few bytes whose frame covers a part of its canvas."""
    data = bytearray(animation(1))
    data[6:10] = struct.pack("<HH", side, side)
    return bytes(data)


def png_with_text(num_bytes: int) -> bytes:
    """Return a PNG with a compressed comment."""
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * num_bytes, zip=True)
    return saved(Image.new("RGB", (60, 60)), "PNG", pnginfo=info)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a PNG of 1.4 gigapixels": (black_png(40_000, 35_000, rows=600), "40,000 x 35,000 pixels are"),
    "a WebP of 268 megapixels": (webp_canvas(16_383), "16,383 x 16,383 pixels are too many"),
    "a GIF of 4 gigapixels": (gif_canvas(65_535), "65,535 x 65,535 pixels are too many"),
    "a long line": (black_png(100_000, 1), "100,000 x 1 pixels are too many"),
    "a longer line": (png_header(MAX_PIXELS, 1) + chunk(b"IDAT"), "pixels are too many"),
    "text that unpacks to 32 MB": (png_with_text(32 << 20), "too large"),
    "a PNG without pixels": (png_header(60, 60) + chunk(b"IDAT"), "cannot be decoded"),
    "half of a JPEG": (picture(600, 400, kind="JPEG")[:4000], "truncated"),
    "half of a PNG": (picture(600, 400)[:900], "cannot be decoded"),
    "a PNG without width": (png_header(0, 60), "not an image"),
    "a PNG that starts like a JPEG": (b"\xff\xd8\xff" + picture(60, 60)[3:], "not an image"),
    "a TIFF": (saved(Image.new("RGB", (60, 60)), "TIFF"), "not an image in a supported format"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "a page": (b"<html>", "not an image"),
    "zeros": (bytes(1 << 16), "not an image"),
}
"""Files that are refused: name -> (content, a part of the reason)."""


def metadata() -> Sequence[dict[str, bytes]]:
    """Return options of `saved` for JPEG with damaged metadata, which are ignored."""
    return [
        {"exif": b"Exif\0\0junk" * 99},
        {"icc_profile": b"\0junk" * 99},
        {"comment": b"x" * 9999},
    ]
