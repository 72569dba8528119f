"""The families whose images are computed, and what a client must know of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.engine.attachments import ImageSupport
from worker.spec.fields import read_json
from worker.spec.wrappers import text_name

IMAGE_TOKENS = {
    "idefics3": "image_token_id",
    "smolvlm": "image_token_id",
    "llava_onevision": "image_token_index",
    "mistral3": "image_token_index",
    "gemma3": "image_token_index",
    "gemma4": "image_token_id",
    "internvl": "image_token_id",
    "llava_next": "image_token_index",
    "glm4v": "image_token_id",
    "glm4v_moe": "image_token_id",
    "glm46v": "image_token_id",
    "glm_ocr": "image_token_id",
    "qwen2_vl": "image_token_id",
    "qwen2_5_vl": "image_token_id",
    "qwen3_vl": "image_token_id",
    "qwen3_vl_moe": "image_token_id",
    "qwen3_5": "image_token_id",
    "qwen3_5_moe": "image_token_id",
}
"""`model_type` -> the key of config.json with the id of the placeholder. In these families a
position of an image sees only those before it, unless AttentionSpec.sees_whole_runs is set."""
WITH_GRID = frozenset(kind for kind in IMAGE_TOKENS if kind.startswith(("qwen", "glm")))
"""Those of them whose rotary positions of an image have several axes (M-RoPE). In the others the
positions are those in the prompt."""
OTHER_KEYS = ("image_token_index", "image_token_id")
FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
OF_SOUND = ("audio_tower.", "embed_audio.")
"""Prefixes of the tensors for sound, which is not served."""
NEEDED = ("transformers", "PIL")


def image_support(path: Path, *, device: str, world_size: int) -> ImageSupport | None:
    """Return how a checkpoint's images are served; None if its family's images are not computed."""
    if not path.is_dir() or not (path / "config.json").is_file():
        return None
    config = read_json(path / "config.json")
    kind = str(config.get("model_type"))
    if kind not in IMAGE_TOKENS or "vision_config" not in config:
        return None
    keys = (IMAGE_TOKENS[kind], *OTHER_KEYS)
    token = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
    if token is None:
        return None
    return ImageSupport(
        model_type=kind,
        token_id=token,
        files={name: (path / name).read_bytes() for name in FILES if (path / name).is_file()},
        reason=_reason(device, world_size),
        needs_grid=kind in WITH_GRID,
    )


def longest_run(path: Path) -> int:
    """Return the most tokens of an image of Gemma 3 or 4, whose tokens see each other."""
    if read_json(path / "config.json").get("model_type") == "gemma3":
        return _whole_number(path, "config.json", "mm_tokens_per_image") or 256
    of_processor = (_whole_number(path, name, "max_soft_tokens") for name in reversed(FILES))
    return next(filter(None, of_processor), 280)


def _whole_number(path: Path, file: str, key: str) -> int:
    """Return a number in a file of the checkpoint, or in its `image_processor`; 0: it has none."""
    content = read_json(path / file) if (path / file).is_file() else {}
    inner = content.get("image_processor")
    value = (content if not isinstance(inner, dict) else content | inner).get(key)
    return value if isinstance(value, int) else 0


def _reason(device: str, world_size: int) -> str:
    """Return why the worker cannot encode images, with the remedy; "" if it can."""
    if any(find_spec(name) is None for name in NEEDED):
        return (
            "the server lacks the packages for images; its operator can install the extra 'images'"
        )
    if world_size > 1:
        return "images are not computed with --tensor-parallel: serve without it"
    if device != "cpu":
        return "images are computed on a CPU only: serve with --device cpu"
    return ""


def tower_key(name: str) -> str:
    """Return the name of a tensor without the prefixes that only some files and classes have."""
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)


def is_of_images(name: str) -> bool:
    """Return whether a tensor of a checkpoint belongs to its image encoder."""
    key = tower_key(name)
    return key == "image_newline" or (text_name(name) is None and not key.startswith(OF_SOUND))


def shrunk_text(config: Any) -> None:
    """Make the text part of a transformers config as small as its encoder allows."""
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.intermediate_size = 1, 8, 8
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if hasattr(text, key):
            setattr(text, key, 0)
    for key in ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if getattr(text, key, None):
            setattr(text, key, 1)
    if hasattr(config, "audio_config"):
        config.audio_config = None
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    if hasattr(config, "pad_token_id"):
        config.pad_token_id = None
