"""Images of every supported format are decoded in the sandbox process. Those that would cost too
much, or are damaged, are refused with their path, and the next image is read as before."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from gateway.images.limits import MAX_PIXELS
from gateway.images.reader import ImageReader, ImageTimes, ProcessedImage
from gateway.images.settings import ProcessorSettings
from gateway.images.source import ImageSource
from protocol.wire.errors import InvalidImage
from tests.support.image_models import picture

pytestmark = pytest.mark.long

PARAM = "messages[0].content[0].image_url.url"
SETTINGS = ProcessorSettings(
    processor="qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    values={"min_pixels": 784, "max_pixels": 784 * 64},
    arguments={},
    tensors=("pixel_values", "image_grid_thw"),
)


class NoUrls:
    """The fetcher of a server that loads no images."""

    def fetch(self, source: ImageSource) -> bytes:
        raise InvalidImage.at(source.param, "not loaded")


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    with closing(ImageReader(NoUrls(), offload=lambda work: work())) as found:
        yield found


def read(reader: ImageReader, data: bytes) -> ProcessedImage:
    return reader.read([ImageSource(PARAM, data=data)], SETTINGS, ImageTimes())[0]


def pixels(image: ProcessedImage) -> Any:
    return np.frombuffer(image.tensors[0].data.data, np.float32)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)


def png_bomb() -> bytes:
    """Return a PNG of 4 GB in less than 30 kB."""
    compressor = zlib.compressobj(9)
    data = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(24)) + compressor.flush()
    return png_header(40_000, 35_000) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp_bomb() -> bytes:
    size = (16_382).to_bytes(3, "little")
    head = b"VP8X" + struct.pack("<I", 10) + bytes(4) + size + size
    return b"RIFF" + struct.pack("<I", 4 + len(head)) + b"WEBP" + head


def animation(num_frames: int) -> bytes:
    frames = [Image.new("RGB", (64, 64), (each % 256, 0, 0)) for each in range(num_frames)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def png_with_text(num_bytes: int) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * num_bytes, zip=True)
    return saved(opened(picture(60, 60)), "PNG", pnginfo=info)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP"])
def test_each_lossless_format_has_the_same_pixels(reader: ImageReader, kind: str) -> None:
    flat = Image.new("RGB", (60, 80), (10, 200, 30))
    options = {"lossless": True} if kind == "WEBP" else {}
    found = read(reader, saved(flat, kind, **options))
    assert np.array_equal(pixels(found), pixels(read(reader, saved(flat, "PNG"))))


def test_a_jpeg_is_decoded(reader: ImageReader) -> None:
    assert read(reader, picture(60, 80, kind="JPEG")).facts.numbers["image_grid_thw"] == [1, 6, 4]


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16", "CMYK"])
def test_every_mode_becomes_rgb(reader: ImageReader, mode: str) -> None:
    image = opened(picture(60, 80)).convert("I" if mode == "I;16" else mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    data = saved(image.convert(mode), "JPEG" if kind == "TIFF" else kind)
    assert read(reader, data).facts.numbers["image_grid_thw"] == [1, 6, 4]


def test_sixteen_bits_of_grey_keep_their_range(reader: ImageReader) -> None:
    deep = Image.fromarray(np.full((64, 64), 128 * 257, np.uint16))
    grey = Image.new("L", (64, 64), 128)
    assert np.array_equal(
        pixels(read(reader, saved(deep, "PNG"))), pixels(read(reader, saved(grey, "PNG")))
    )


@pytest.mark.parametrize("value", range(2, 9))
def test_the_orientation_of_a_camera_is_undone(reader: ImageReader, value: int) -> None:
    upright = opened(picture(60, 90))
    exif = Image.Exif()
    exif[0x0112] = value
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[value]
    turned = saved(upright.transpose(undo), "PNG", exif=exif)
    assert np.array_equal(pixels(read(reader, turned)), pixels(read(reader, saved(upright, "PNG"))))


def test_only_the_first_frame_of_an_animation_is_read(reader: ImageReader) -> None:
    found = read(reader, animation(100))
    assert np.array_equal(pixels(found), pixels(read(reader, animation(1))))


@pytest.mark.parametrize(
    "options",
    [{"exif": b"Exif\0\0junk" * 99}, {"icc_profile": b"\0junk" * 99}, {"comment": b"x" * 9999}],
    ids=["exif", "icc", "comment"],
)
def test_damaged_metadata_is_ignored(reader: ImageReader, options: dict[str, bytes]) -> None:
    image = opened(picture(60, 80))
    plain, junk = saved(image, "JPEG"), saved(image, "JPEG", **options)
    assert np.array_equal(pixels(read(reader, junk)), pixels(read(reader, plain)))


ATTACKS = {
    "a PNG of 4 GB": (png_bomb(), "40,000 x 35,000 pixels are too many"),
    "a WebP of 1 GB": (webp_bomb(), "16,383 x 16,383 pixels are too many"),
    "a long side": (png_header(MAX_PIXELS, 1) + chunk(b"IDAT", b""), "pixels are too many"),
    "text that unpacks to 32 MB": (png_with_text(32 << 20), "too large"),
    "a PNG without pixels": (png_header(60, 60) + chunk(b"IDAT", b""), "cannot be decoded"),
    "half of a JPEG": (picture(600, 400, kind="JPEG")[:4000], "truncated"),
    "half of a PNG": (picture(600, 400)[:900], "cannot be decoded"),
    "an empty PNG": (png_header(0, 60), "not an image"),
    "a TIFF": (saved(Image.new("RGB", (60, 60)), "TIFF"), "not an image in a supported format"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "a page": (b"<html>", "not an image"),
    "zeros": (bytes(1 << 16), "not an image"),
    "a narrow strip": (picture(2000, 4), "aspect ratio"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_costly_or_damaged_image_is_refused(reader: ImageReader, name: str) -> None:
    data, why = ATTACKS[name]
    with pytest.raises(InvalidImage, match=why) as refused:
        read(reader, data)
    assert refused.value.param == PARAM
    assert read(reader, picture(60, 80)).num_bytes


def test_an_image_is_processed_once(reader: ImageReader) -> None:
    first, second = ImageTimes(), ImageTimes()
    source = ImageSource(PARAM, data=picture(90, 90, 3))
    found = reader.read([source, source], SETTINGS, first)
    again = reader.read([source], SETTINGS, second)
    assert (first.num_images, first.num_hits, second.num_hits) == (2, 1, 1)
    assert found[0] is found[1] is again[0]


def test_the_cache_drops_the_least_recently_used_images() -> None:
    sources = [ImageSource(PARAM, data=picture(90, 90, seed)) for seed in range(3)]
    with closing(ImageReader(NoUrls(), offload=lambda work: work(), cache_bytes=500_000)) as small:
        times = ImageTimes()
        size = small.read(sources[:1], SETTINGS, times)[0].num_bytes
        assert 2 * size < 500_000 < 3 * size
        small.read([sources[1], sources[0], sources[2], sources[0], sources[1]], SETTINGS, times)
    assert times.num_hits == 2
