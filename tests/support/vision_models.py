"""Tiny models of images: inputs of their encoders, prompts with images, and the answers of
transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protocol.engine.attachments import AttachedTensor, Attachment
from tests.support.checkpoints import VOCAB
from tests.support.eager import some_tokens
from tests.support.image_engine import ImageEngine, attached, reference
from tests.support.wrapper_models import random_wrapper, write_wrapper

ARCHITECTURES = {
    "SmolVLMForConditionalGeneration": "llama",
    "Idefics3ForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "InternVLForConditionalGeneration": "qwen2",
    "LlavaNextForConditionalGeneration": "granite",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "Glm46VForConditionalGeneration": "glm4v_text",
    "GlmOcrForConditionalGeneration": "glm_ocr_text",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
"""Architecture -> `model_type` of its text part."""
WHOLE_RUNS = {"Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"}
"""Architectures whose images are computed as a whole."""
WITH_AXES = ("Qwen", "Glm")
"""Begins of the architectures whose rotary positions have several axes."""
HALF_TURNED = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    }
}
COMPILED_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
"""Heads of the size 32, which the compiled kernels support."""
OTHER_PARTS_OF_GEMMA4 = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
    "standardize": True,
}
CHANGES: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "whole": {"mm_tokens_per_image": 16, "vision_config": {"image_size": 56}},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,  # less than an image
    },
    "Qwen3_5ForConditionalGeneration": HALF_TURNED,
    "Qwen3_5MoeForConditionalGeneration": HALF_TURNED,
    # Those of Qwen2-VL and GLM-4.6V are computed by torch.
    "Glm4vForConditionalGeneration": COMPILED_HEADS | HALF_TURNED,
    "Glm4vMoeForConditionalGeneration": COMPILED_HEADS | HALF_TURNED,
    "Qwen2_5_VLForConditionalGeneration": {
        **COMPILED_HEADS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 6, 6],
        },
    },
    "Gemma4ForConditionalGeneration": {
        "whole": {"vision_config": OTHER_PARTS_OF_GEMMA4},
        "use_bidirectional_attention": "vision",
        "sliding_window": 6,
    },
    "InternVLForConditionalGeneration": {
        "whole": {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}}
    },
    "LlavaNextForConditionalGeneration": {
        "whole": {  # as in Granite Vision
            "vision_config": {"model_type": "siglip_vision_model"},
            "vision_feature_layer": [-2, -1],
            "vision_feature_select_strategy": "full",
        }
    },
}
"""Architecture -> keys of the config, as in `random_wrapper`."""
GRIDS = [(4, 6), (8, 2), (2, 4), (6, 6), (2, 10)]
"""Rows and columns of the patches of an image of Qwen's and GLM's families, by its seed."""
LENGTHS = [(0, 6), (5, 6), (5, 4, 6), (5, 1, 0, 3)]
"""Lengths of the texts around the images: an image first, between texts, several, and beside each
other. A text is between any two images of families whose classes take adjacent ones for one."""
MAX_SLOTS = 4
PLACEHOLDER = VOCAB - 1
NUM_TOKENS = 5
Arrays = dict[str, np.ndarray[Any, Any]]


def image_inputs(architecture: str, seed: int) -> Arrays:
    """Return what the family's image processor would return for one image."""
    if architecture.startswith(WITH_AXES):
        rows, columns = GRIDS[seed % len(GRIDS)]
        patch = 3 * 2 * 14 * 14
        patches = np.random.default_rng(seed).normal(size=(rows * columns, patch))
        grid = np.array([[1, rows, columns]], np.int64)
        return {"pixel_values": patches.astype(np.float32), "image_grid_thw": grid}
    pixels = np.random.default_rng(seed).normal(size=(1, 3, 3, 28, 28)).astype(np.float32)
    if architecture.startswith("Llava"):
        return {"pixel_values": pixels, "image_sizes": np.array([[28, 56]], np.int64)}
    if architecture.startswith("Gemma4"):
        patches = np.random.default_rng(seed).uniform(size=(1, 44, 48)).astype(np.float32)
        y, x = np.divmod(np.arange(44), 4)
        positions = np.stack([x, y], -1)
        positions[32:] = -1  # padding
        patches[:, 32:] = 0
        return {"pixel_values": patches, "image_position_ids": positions[None].astype(np.int64)}
    if architecture.startswith(("Gemma3", "InternVL")):
        square = np.random.default_rng(seed).normal(size=(1, 3, 56, 56)).astype(np.float32)
        return {"pixel_values": square}
    if architecture.startswith("Mistral3"):
        wide = np.random.default_rng(seed).normal(size=(1, 3, 56, 84)).astype(np.float32)
        return {"pixel_values": wide, "image_sizes": np.array([[56, 84]], np.int64)}
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": np.ones((1, 3, 28, 28), np.int64),
    }


@dataclass
class TinyVision:
    """A tiny model, its directory, and an engine that serves it."""

    architecture: str
    model: Any
    directory: Path
    _num_rows: dict[int, int] = field(default_factory=dict)

    def num_rows(self, seed: int) -> int:
        """Return the number of rows that transformers' encoder makes of an image."""
        if seed not in self._num_rows:
            made = self.model.model.get_image_features(**self.inputs(seed)).pooler_output
            self._num_rows[seed] = sum(part.numel() // part.shape[-1] for part in made)
        return self._num_rows[seed]

    def grid(self, seed: int) -> tuple[int, int, int] | None:
        """Return the (frames, rows, columns) of an image, for families that need them."""
        if not self.architecture.startswith(WITH_AXES):
            return None
        rows, columns = GRIDS[seed % len(GRIDS)]
        return 1, rows // 2, columns // 2

    def inputs(self, *seeds: int) -> dict[str, torch.Tensor]:
        """Return the inputs of transformers' model for images with these seeds."""
        each = [image_inputs(self.architecture, seed) for seed in seeds]
        axis = 1 if "pixel_attention_mask" in each[0] else 0
        return {
            name: torch.from_numpy(np.concatenate([image[name] for image in each], axis))
            for name in each[0]
        }

    @property
    def is_whole(self) -> bool:
        return self.architecture in WHOLE_RUNS

    @property
    def types(self) -> str:
        """The argument of transformers' model that says which tokens are those of an image; "": it
        needs none."""
        if self.architecture.startswith("Gemma3"):
            return "token_type_ids"
        return "mm_token_type_ids" if self.is_whole or self.grid(0) is not None else ""

    def budget(self, number: int) -> int:
        """Return a token budget, the smallest of all for number 4."""
        return number + self.num_rows(0) + MAX_SLOTS - 1 - 4 if self.is_whole else number

    def tensors(self, seed: int) -> list[AttachedTensor]:
        return attached(image_inputs(self.architecture, seed))


@lru_cache
def family(architecture: str, directory: Path) -> TinyVision:
    """Return the tiny model of an architecture, and write it to `directory`."""
    return written(architecture, directory, **CHANGES.get(architecture, {}))


def written(architecture: str, directory: Path, **changes: Any) -> TinyVision:
    """Return a tiny model, and write it to `directory`.

    changes   those of `random_wrapper`
    """
    model = random_wrapper(architecture, ARCHITECTURES[architecture], **changes)
    if hasattr(model.config, "image_grid_pinpoints"):
        model.config.image_grid_pinpoints = [[28, 56], [56, 28]]
    tiny = TinyVision(architecture, model, write_wrapper(directory, model))
    processor = {"max_soft_tokens": tiny.num_rows(0)}  # read from Gemma 4
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return tiny


def text(count: int, seed: int) -> list[int]:
    return [token for token in some_tokens(count, seed) if token != PLACEHOLDER]


def prompt_with(
    tiny: TinyVision, *lengths: int, first: int = 0
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a prompt with an image between each two texts of these lengths, and its runs. `first`
    is the seed of the first image."""
    prompt, runs = text(lengths[0], 1), []
    for number, length in enumerate(lengths[1:]):
        num_rows = tiny.num_rows(first + number)
        runs.append((len(prompt), num_rows))
        prompt += [PLACEHOLDER] * num_rows + text(length, 2 + number)
    return prompt, runs


def attach(engine: ImageEngine, tiny: TinyVision, runs: Any, seeds: Any) -> list[Attachment]:
    pairs = zip(runs, seeds, strict=True)
    return [engine.attach(tiny.tensors(seed), run, grid=tiny.grid(seed)) for run, seed in pairs]


def check(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert abs(ours - theirs) < 1e-4


def ask(
    engine: ImageEngine,
    tiny: TinyVision,
    *lengths: int,
    first: int = 0,
    num_tokens: int = NUM_TOKENS,
) -> int:
    """Add a request with images whose seeds are `first` and those after it."""
    prompt, runs = prompt_with(tiny, *lengths, first=first)
    images = attach(engine, tiny, runs, range(first, first + len(runs)))
    return engine.add(prompt, images, max_tokens=num_tokens, logprobs=0)


def answer_of(
    tiny: TinyVision, *lengths: int, first: int = 0, num_tokens: int = NUM_TOKENS
) -> list[tuple[int, float]]:
    """Return the answer of transformers' model."""
    prompt, runs = prompt_with(tiny, *lengths, first=first)
    inputs = tiny.inputs(*range(first, first + len(runs)))
    return reference(tiny.model, prompt, num_tokens, tiny.types, **inputs)
