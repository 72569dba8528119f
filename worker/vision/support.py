"""The families whose images are computed, and what a client must know of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.engine.attachments import ImageSupport
from worker.spec.fields import read_json

IMAGE_TOKENS = {
    "idefics3": "image_token_id",
    "smolvlm": "image_token_id",
    "llava_onevision": "image_token_index",
    "mistral3": "image_token_index",
    "gemma3": "image_token_index",
    "qwen2_vl": "image_token_id",
    "qwen2_5_vl": "image_token_id",
    "qwen3_vl": "image_token_id",
    "qwen3_vl_moe": "image_token_id",
    "qwen3_5": "image_token_id",
    "qwen3_5_moe": "image_token_id",
}
"""`model_type` -> the key of config.json with the id of the placeholder. In these families a
position of an image sees only those before it, unless AttentionSpec.sees_whole_runs is set."""
WITH_GRID = frozenset(kind for kind in IMAGE_TOKENS if kind.startswith("qwen"))
"""Those of them whose rotary positions of an image have several axes (M-RoPE). In the others the
positions are those in the prompt."""
OTHER_KEYS = ("image_token_index", "image_token_id")
FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
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
    """Return the most tokens of an image whose tokens see each other."""
    found = read_json(path / "config.json").get("mm_tokens_per_image")
    return found if isinstance(found, int) else 256


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


def shrunk_text(config: Any) -> None:
    """Make the text part of a transformers config as small as its encoder allows."""
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.intermediate_size = 1, 8, 8
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if hasattr(text, name):
            setattr(text, name, 1)
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    if hasattr(config, "pad_token_id"):
        config.pad_token_id = None
