"""Images of every supported format are decoded in the sandbox process. Those that would cost too
much, or are damaged, are refused with their path, and the next image is read as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gateway.images.limits import MAX_FETCH_S, MAX_LOADED_BYTES, MAX_PROCESS_S
from gateway.images.memory import Grow, ProcessedImage
from gateway.images.reader import ImageReader, ImageTimes
from gateway.images.settings import ProcessorSettings
from gateway.images.source import ImageSource
from protocol.wire.errors import InvalidImage, Overloaded
from tests.support.hostile_images import HOSTILE, animation, metadata, saved
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

    def fetch(self, source: ImageSource, grow: Grow) -> bytes:
        raise InvalidImage.at(source.param, "not loaded")


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    with closing(ImageReader(NoUrls(), offload=lambda work: work())) as found:
        yield found


def read(reader: ImageReader, data: bytes) -> ProcessedImage:
    return reader.read([ImageSource(PARAM, data=data)], SETTINGS, ImageTimes())[0]


def pixels(image: ProcessedImage) -> Any:
    return np.frombuffer(image.tensors[0].data.data, np.float32)


def opened(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data))


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


@pytest.mark.parametrize("options", metadata(), ids=["exif", "icc", "comment"])
def test_damaged_metadata_is_ignored(reader: ImageReader, options: dict[str, bytes]) -> None:
    image = opened(picture(60, 80))
    plain, junk = saved(image, "JPEG"), saved(image, "JPEG", **options)
    assert np.array_equal(pixels(read(reader, junk)), pixels(read(reader, plain)))


REFUSED = HOSTILE | {"a narrow strip": (picture(2000, 4), "aspect ratio")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_costly_or_damaged_image_is_refused(reader: ImageReader, name: str) -> None:
    data, why = REFUSED[name]
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


@pytest.fixture(scope="module")
def small() -> Iterator[ImageReader]:
    """Yield a reader with memory for two images of 90 x 90 pixels."""
    with closing(ImageReader(NoUrls(), offload=lambda work: work(), max_bytes=500_000)) as found:
        yield found


def test_images_of_open_requests_share_a_limit_of_memory(small: ImageReader) -> None:
    sources = [ImageSource(f"[{seed}]", data=picture(90, 90, seed)) for seed in range(4)]
    first = small.read(sources[:2], SETTINGS, ImageTimes())
    assert small.memory.num_bytes == sum(each.num_bytes for each in first)
    with pytest.raises(Overloaded, match="the images of open requests"):
        small.read(sources[2:3], SETTINGS, ImageTimes())
    assert len(small.read([*sources[:2], sources[0]], SETTINGS, ImageTimes())) == 3
    del first
    with pytest.raises(InvalidImage, match="more than 0 MiB") as refused:
        small.read(sources, SETTINGS, ImageTimes())
    assert refused.value.param == "[2]"
    del refused
    assert len(small.read(sources[2:], SETTINGS, ImageTimes())) == 2


def test_uploaded_images_that_are_loaded_share_a_limit_of_memory(small: ImageReader) -> None:
    file = picture(90, 90, 8)
    images = [ImageSource(PARAM, file_id=name) for name in ("a", "b")]
    assert len(small.read(images, SETTINGS, ImageTimes(), lambda source: file)) == 2
    with pytest.raises(Overloaded, match="being loaded fill the 128 MiB"):
        small.read(images, SETTINGS, ImageTimes(), lambda source: bytes(MAX_LOADED_BYTES + 1))
    assert len(small.read(images, SETTINGS, ImageTimes(), lambda source: file)) == 2


def test_the_images_of_a_request_share_a_limit_of_time(small: ImageReader) -> None:
    source = ImageSource("[1]", data=picture(90, 90, 9))
    with pytest.raises(InvalidImage, match="took 61 s to decode and preprocess") as refused:
        small.read([source], SETTINGS, ImageTimes(preprocess_s=MAX_PROCESS_S + 1))
    assert refused.value.param == "[1]"
    url = ImageSource("[1]", url="http://example.com/")
    with pytest.raises(InvalidImage, match="took 31 s to load"):
        small.read([url], SETTINGS, ImageTimes(fetch_s=MAX_FETCH_S + 1))
