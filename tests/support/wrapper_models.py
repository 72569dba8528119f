"""Tiny random models of images or sound, whose text part is a decoder of a family of ours."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.checkpoints import VOCAB, write_directory
from tests.support.family_models import OWN_SIZES, SIZES
from worker.spec.wrappers import TEXT_TYPES, WRAPPERS

CASES = [(name, kind) for name, kinds in WRAPPERS.items() for kind in sorted(kinds)]
OTHER_PARTS: dict[str, Any] = {
    "hidden_size": 48,
    "embed_dim": 48,
    "d_model": 48,
    "intermediate_size": 64,
    "encoder_ffn_dim": 64,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "num_layers": 1,
    "depth": 1,
    "num_heads": 4,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": SIZES["hidden_size"],
    "projection_dim": SIZES["hidden_size"],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
"""Sizes of the part for images or sound. Each config takes the keys that it has."""
OWN_PARTS: dict[str, Any] = {"qwen2_vl": {"hidden_size": SIZES["hidden_size"]}}
"""Sizes of the part of one `model_type`. That of Qwen2-VL calls its width `embed_dim`, and what it
makes `hidden_size`."""
CLASSES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
"""Architecture in published configs -> the class of transformers."""
M_ROPE: dict[str, dict[str, Any]] = {
    "glm4": {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5},
    "glm4_moe": {"mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5},
    "glm_ocr_text": {"mrope_section": [4, 6, 6]},
    "qwen2": {"mrope_section": [4, 2, 2]},
    "qwen3": {"mrope_section": [8, 4, 4]},
    "qwen3_moe": {"mrope_section": [8, 4, 4]},
}
"""Decoder, or `model_type` of a text part -> rope parameters of its models of images."""
TIMM_USER = "transformers.models.gemma3n.modeling_gemma3n.AutoModel"
"""It is imported only for a Gemma 3n: each process of pytest reads this file, and the import takes
two seconds of CPU time."""


def random_wrapper(
    architecture: str, kind: str, *, whole: Mapping[str, Any] | None = None, **changes: Any
) -> Any:
    """Return a tiny random model of this architecture whose text part has the `model_type` `kind`.

    whole     keys of the config; those of its parts are merged
    changes   keys of the text part's config
    """
    by_architecture: dict[str, str] = {}
    for names in (
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, name in names.items():  # the first one; others share its class
            by_architecture.setdefault(name, model_type)
    class_name = CLASSES.get(architecture, architecture)
    config_class = CONFIG_MAPPING[by_architecture[class_name]]
    parts = {
        name: _other_part(part)
        for name in ("vision_config", "audio_config")
        if (part := getattr(config_class(), name, None)) is not None
    }
    decoder = TEXT_TYPES.get(kind, {}).get("model_type", kind)
    text = {**SIZES, **OWN_SIZES.get(decoder, {}), "model_type": kind}
    if kind == "glm4v_text":
        del text["head_dim"]  # its class divides the hidden size by the number of heads
    if kind == "granite":
        text["logits_scaling"] = 1.0  # transformers' class of the whole model ignores it
    if kind in TEXT_TYPES and decoder in M_ROPE:
        own = M_ROPE.get(kind, M_ROPE[decoder])
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **own}
    for name, value in (whole or {}).items():
        is_part = isinstance(value, Mapping)
        parts[name] = {**parts.get(name, {}), **value} if is_part else value
    config = config_class(text_config={**text, **changes}, **parts)
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            setattr(config, name, VOCAB - 1)
    torch.manual_seed(5)
    is_timm_used = architecture.startswith("Gemma3n")
    with patch(TIMM_USER, PartsWithoutTimm) if is_timm_used else nullcontext():
        model = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


def write_wrapper(path: Path, model: Any) -> Path:
    """Write a model to the directory `path` with the names of published files, and return `path`.

    When transformers 5.24 writes a Kimi K2.5, it also renames the layers of the text part, as it
    does with those of the part for images. It leaves out a part of the names of SigLIP and CLIP."""
    file = write_directory(path, model) / "model.safetensors"
    vision = getattr(model.config, "vision_config", None)
    if model.config.model_type == "kimi_k25":
        _rename(file, "language_model.model.blocks.", "language_model.model.layers.")
    elif getattr(vision, "model_type", "") in ("siglip_vision_model", "clip_vision_model"):
        _rename(file, "vision_tower.", "vision_tower.vision_model.")
    return path


def _rename(file: Path, wrong: str, right: str) -> None:
    """Rename the tensors whose names start with `wrong`."""
    weights = load_file(file)
    assert any(name.startswith(wrong) for name in weights)
    renamed = {
        right + name.removeprefix(wrong) if name.startswith(wrong) else name: each
        for name, each in weights.items()
    }
    save_file(renamed, file, {"format": "pt"})


class PartsWithoutTimm:
    """Makes the parts of a Gemma 3n. Its part for images, which the package timm would compute, has
    one tensor."""

    @staticmethod
    def from_config(config: Any) -> Any:
        if config.model_type == "gemma3n_vision":
            return torch.nn.Linear(2, 3, bias=False)
        return transformers.AutoModel.from_config(config)


def _other_part(config: Any) -> dict[str, Any]:
    """Return small sizes for the config of a part for images or sound."""
    keys = config.to_dict()
    sizes = {name: size for name, size in OTHER_PARTS.items() if name in keys}
    kind = keys.get("model_type")
    return {**sizes, **OWN_PARTS.get(str(kind).removesuffix("_vision"), {}), "model_type": kind}
