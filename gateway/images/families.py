"""How each family of models puts images into a prompt.

The chat template writes a marker for each image. An `ImagePrompter` replaces it with the text that
the family's processor in transformers writes: one placeholder for each row that the encoder makes,
and the labels of tiles or ends of rows between them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.images.settings import CheckpointFiles, ProcessorSettings


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What an image processor says of an image, as far as a prompt depends on it."""

    #: Name of a small output -> its whole numbers.
    numbers: Mapping[str, Sequence[int]]
    #: Name of an output -> its shape.
    shapes: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ImageText:
    """The text of an image in a prompt, and the (frames, rows, columns) of its placeholders; None:
    positions need no grid."""

    text: str
    grid: tuple[int, int, int] | None = None


class ImagePrompter(ABC):
    """Writes the text of images for one model.

    files   the checkpoint's files
    tokens  name -> text of the model's special tokens
    pad     the placeholder
    """

    #: Module and class of the image processor, below `transformers.models`.
    processor: str
    #: The outputs of the processor that the encoder takes.
    tensors: tuple[str, ...]
    #: Whether an image is processed differently if it is one of several.
    differs_in_company = False

    def __init__(self, files: CheckpointFiles, tokens: Mapping[str, str], pad: str) -> None:
        self.files = files
        self.tokens = tokens
        self.pad = pad

    @property
    def marker(self) -> str:
        """The text that the chat template writes for an image."""
        return self.pad

    @property
    def framed(self) -> str:
        """The marker with the tokens around it, for templates that write none."""
        return self.marker

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of each call of the processor besides the checkpoint's settings."""
        return {}

    def settings(self, *, has_company: bool) -> ProcessorSettings:
        """Return the settings of the processor for an image that is, or is not, one of several."""
        return ProcessorSettings(
            processor=self.processor,
            values=dict(self.files.image),
            arguments=self.arguments,
            tensors=self.tensors,
            has_company=has_company and self.differs_in_company,
        )

    @abstractmethod
    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        """Return the text of an image."""


class TiledPrompter(ImagePrompter):
    """SmolVLM and Idefics 3: tiles with labels, row by row, and then the whole image."""

    processor = "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil"
    tensors = ("pixel_values", "pixel_attention_mask")
    arguments = {"return_row_col_info": True}  # never changed

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        rows, columns = facts.numbers["rows"][0], facts.numbers["cols"][0]
        edge = self.tokens.get("fake_image_token", "<fake_token_around_image>")
        whole = self.tokens.get("global_image_token", "<global-img>")
        pads = self.pad * self.files.joint_int("image_seq_len", 169)
        tiles = [
            "".join(f"{edge}<row_{row}_col_{column}>{pads}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        parts = [f"{tile}\n" for tile in tiles] + (["\n"] if tiles else [])
        return ImageText("".join(parts) + f"{edge}{whole}{pads}{edge}")


class Idefics3Prompter(TiledPrompter):
    processor = "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil"


class AnyResolutionPrompter(ImagePrompter):
    """LLaVA-OneVision: the whole image, and tiles of it without their padding. An image that is one
    of several has no tiles."""

    processor = (
        "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil"
    )
    tensors: tuple[str, ...] = ("pixel_values", "image_sizes", "batch_num_images")
    differs_in_company = True

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        whole = self._whole
        count = whole + 1 if has_company else whole + self._num_tiled(facts)
        if self.files.joint.get("vision_feature_select_strategy") == "default":
            count -= 1
        return ImageText(self.pad * count)

    @property
    def _whole(self) -> int:
        """Number of rows of the whole image."""
        return self.files.joint_int("num_image_tokens", 729)

    def _num_tiled(self, facts: ImageFacts) -> int:
        """Return the number of rows of all tiles, with one more for the end of each line."""
        height, width = facts.numbers["image_sizes"][:2]
        tile_height, tile_width = facts.shapes["pixel_values"][-2:]
        best_height, best_width = best_resolution(height, width, self._resolutions)
        side = math.isqrt(self._whole)
        rows, columns = side * (best_height // tile_height), side * (best_width // tile_width)
        rows, columns = unpadded(height, width, rows, columns)
        most = int(str(self.files.joint.get("vision_aspect_ratio", "anyres_max_9")).split("_")[-1])
        shrink = math.sqrt(rows * columns / (most * side**2))
        if shrink > 1.1:
            rows, columns = int(rows // shrink), int(columns // shrink)
        return rows * columns + rows

    @property
    def _resolutions(self) -> Sequence[tuple[int, int]]:
        found = self.files.image.get("image_grid_pinpoints") or self.files.config.get(
            "image_grid_pinpoints"
        )
        return [(int(height), int(width)) for height, width in found or ()]


def best_resolution(
    height: int, width: int, resolutions: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Return the resolution that keeps the most pixels of an image, and wastes the fewest. Raises
    ValueError if there are none."""

    def merit(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=merit)


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a grid without those that only the padding of an image covers,
    which has made it as wide or as high as the grid."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2


class LinePrompter(ImagePrompter):
    """Mistral 3 and Pixtral: a line of placeholders for each line of patches, with a token after
    each line."""

    processor = "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil"
    tensors = ("pixel_values", "image_sizes")

    @property
    def _patch(self) -> int:
        """Height and width in pixels of the square that one placeholder stands for."""
        return self.files.joint_int("patch_size", 16) * self.files.joint_int(
            "spatial_merge_size", 1
        )

    @property
    def arguments(self) -> dict[str, Any]:
        return {"patch_size": self._patch}

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        height, width = facts.numbers["image_sizes"][:2]
        line = self.pad * (width // self._patch)
        between = str(self.files.joint.get("image_break_token", "[IMG_BREAK]"))
        end = str(self.files.joint.get("image_end_token", "[IMG_END]"))
        return ImageText(between.join([line] * (height // self._patch)) + end)


class GridPrompter(ImagePrompter):
    """Qwen2-VL and its successors: as many placeholders as the grid of patches has, after merging
    squares of them. Their positions have three axes."""

    processor = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
    tensors = ("pixel_values", "image_grid_thw")

    @property
    def framed(self) -> str:
        return f"<|vision_start|>{self.marker}<|vision_end|>"

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        frames, rows, columns = facts.numbers["image_grid_thw"][:3]
        side = int(self.files.image.get("merge_size", 2))
        grid = frames, rows // side, columns // side
        return ImageText(self.pad * math.prod(grid), grid)


class Glm4vPrompter(GridPrompter):
    """GLM-4.1V, 4.5V, 4.6V and GLM-OCR: like Qwen2-VL, but the limits of the image processor count
    the pixels of both frames that it makes of an image."""

    processor = "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil"

    @property
    def framed(self) -> str:
        return f"<|begin_of_image|>{self.marker}<|end_of_image|>"


class FixedPrompter(ImagePrompter):
    """Gemma 3: the same number of placeholders for each image. As in transformers, images are not
    cut into crops, whatever the settings of the checkpoint say."""

    processor = "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil"
    tensors = ("pixel_values",)
    arguments = {"do_convert_rgb": True, "do_pan_and_scan": False}  # never changed

    @property
    def marker(self) -> str:
        return self.tokens.get("boi_token", "<start_of_image>")

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        end = self.tokens.get("eoi_token", "<end_of_image>")
        pads = self.pad * self.files.joint_int("image_seq_length", 256)
        return ImageText(f"\n\n{self.marker}{pads}{end}\n\n")


class SoftTokenPrompter(ImagePrompter):
    """Gemma 4: as many placeholders as the image processor counts, between two tokens."""

    processor = "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil"
    tensors = ("pixel_values", "image_position_ids")

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        start = self.tokens.get("boi_token", "<|image>")
        end = self.tokens.get("eoi_token", "<image|>")
        pads = self.pad * facts.numbers["num_soft_tokens_per_image"][0]
        return ImageText(f"{start}{pads}{end}")


class CropPrompter(ImagePrompter):
    """InternVL: the same number of placeholders for each crop of the image, between two tokens. As
    in transformers, images are cropped whatever the settings of the checkpoint say."""

    processor = "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil"
    tensors = ("pixel_values",)
    arguments = {"crop_to_patches": True}  # never changed

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        start = self.tokens.get("start_image_token", "<img>")
        end = self.tokens.get("end_image_token", "</img>")
        count = self.files.joint_int("image_seq_length", 256) * facts.numbers["num_patches"][0]
        return ImageText(f"{start}{self.pad * count}{end}")


class NextPrompter(AnyResolutionPrompter):
    """LLaVA-NeXT and Granite Vision: the whole image and its tiles, also if there are several
    images."""

    processor = "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil"
    tensors = ("pixel_values", "image_sizes")
    differs_in_company = False

    def text(self, facts: ImageFacts, *, has_company: bool) -> ImageText:
        height, width = facts.numbers["image_sizes"][:2]
        tile_height, tile_width = facts.shapes["pixel_values"][-2:]
        vision, joint = self.files.config.get("vision_config") or {}, self.files.joint
        patch = self.files.joint_int("patch_size", vision.get("patch_size", 14))
        rows, columns = tile_height // patch, tile_width // patch
        count = rows * columns + (joint.get("num_additional_image_tokens") or 0)
        best_height, best_width = best_resolution(height, width, self._resolutions)
        rows, columns = rows * (best_height // tile_height), columns * (best_width // tile_width)
        rows, columns = unpadded(height, width, rows, columns)
        is_default = joint.get("vision_feature_select_strategy") == "default"
        return ImageText(self.pad * (count + rows * columns + rows - is_default))


FAMILIES: Mapping[str, Callable[[CheckpointFiles, Mapping[str, str], str], ImagePrompter]] = {
    "smolvlm": TiledPrompter,
    "idefics3": Idefics3Prompter,
    "llava_onevision": AnyResolutionPrompter,
    "mistral3": LinePrompter,
    "glm4v": Glm4vPrompter,
    "glm4v_moe": Glm4vPrompter,
    "glm46v": Glm4vPrompter,
    "glm_ocr": Glm4vPrompter,
    "qwen2_vl": GridPrompter,
    "qwen2_5_vl": GridPrompter,
    "qwen3_vl": GridPrompter,
    "qwen3_vl_moe": GridPrompter,
    "qwen3_5": GridPrompter,
    "qwen3_5_moe": GridPrompter,
    "gemma3": FixedPrompter,
    "gemma4": SoftTokenPrompter,
    "internvl": CropPrompter,
    "llava_next": NextPrompter,
}
"""`model_type` of config.json -> the family's prompter."""
