"""The families whose images are computed, and what a client must know of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from protocol.config.base import NO_PATH
from protocol.config.worker import WorkerConfig
from protocol.engine.attachments import ImageSupport
from protocol.shared.mmproj import ENCODED_ARCHITECTURES, best_mmproj, mmproj_files
from worker.checkpoint.gguf_file import GGUFFile, architecture_at_start
from worker.errors import UnusableModel
from worker.spec.fields import parsed_json, read_json
from worker.vision.encoder_files import CONFIG, TEXTS, DirectoryEncoder, EncoderFiles
from worker.vision.mmproj import MmprojEncoder
from worker.vision.mmproj_header import UNREADABLE

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
WITH_IMAGES = ENCODED_ARCHITECTURES - {"llama"}
"""Architectures of GGUF files whose models mostly read images. Most of `llama` read text only."""
NEEDED = ("transformers", "PIL")


NO_ENCODER = (
    "the server has no image encoder (mmproj file) for this model; if there is one, its operator "
    "can pull the model by its name on the Hub, or give the file with --mmproj"
)


class FoundImages(NamedTuple):
    """The image encoder of a model, or why it has none.

    files    the encoder's files; None: images are refused
    reason   why images are refused, for clients; "": the model reads text only
    cause    why an mmproj file that was found is not used, with its path; "": none was found
    """

    files: EncoderFiles | None
    reason: str = ""
    cause: str = ""


def find_images(config: WorkerConfig) -> FoundImages:
    """Find the image encoder of a model.

    Raises UnusableModel if the file of --mmproj cannot be used. A file that was only found beside
    the model is left out then.
    """
    path, given = Path(config.model), config.mmproj
    if given == NO_PATH:
        return FoundImages(None)
    if path.is_dir() or path.suffix == ".json":
        if given:
            raise UnusableModel(
                f"--mmproj {given} is for GGUF files; a directory has the encoder in its own files",
                remedy="serve without --mmproj",
            )
        return FoundImages(_directory_encoder(path))
    try:
        found = Path(given) if given else mmproj_beside(path)
        if found is None:
            reads_images = architecture_at_start(path) in WITH_IMAGES
            return FoundImages(None, NO_ENCODER if reads_images else "")
        return FoundImages(MmprojEncoder(found, GGUFFile(path)))
    except UnusableModel as error:
        if given:
            raise UnusableModel(
                f"--mmproj: {error.message}", remedy=error.remedy or UNREADABLE
            ) from error
        return FoundImages(None, NO_ENCODER, error.message)


def mmproj_beside(path: Path) -> Path | None:
    """Return the mmproj file beside a GGUF file (`mmproj_files`); None if there is none. Raises
    UnusableModel if it is not clear which one is the model's."""
    found = {each.name: each for each in mmproj_files(path)}
    best = best_mmproj(found)
    if best is None and found:
        raise UnusableModel(
            "the names of the mmproj files beside the model differ in more than the number type: "
            f"{', '.join(sorted(found))}; choose one with --mmproj"
        )
    return None if best is None else found[best]


def _directory_encoder(path: Path) -> EncoderFiles | None:
    if not (path / CONFIG).is_file():
        return None
    config = read_json(path / CONFIG)
    if str(config.get("model_type")) not in IMAGE_TOKENS or "vision_config" not in config:
        return None
    return DirectoryEncoder(path)


def image_support(files: EncoderFiles, *, device: str, world_size: int) -> ImageSupport | None:
    """Return how the images of an encoder are served; None if its config names no placeholder."""
    config = files.config
    kind = str(config["model_type"])
    keys = (IMAGE_TOKENS[kind], *OTHER_KEYS)
    token = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
    if token is None:
        return None
    return ImageSupport(
        model_type=kind,
        token_id=token,
        files=files.texts,
        reason=_reason(device, world_size),
        needs_grid=kind in WITH_GRID,
    )


def without_encoder(found: FoundImages) -> ImageSupport | None:
    """Return what clients must know of images that are refused because there is no encoder; None
    if the model reads text only."""
    if not found.reason:
        return None
    return ImageSupport(model_type="", token_id=-1, reason=found.reason)


def longest_run(files: EncoderFiles) -> int:
    """Return the most tokens of an image of Gemma 3 or 4, whose tokens see each other."""
    if files.config["model_type"] == "gemma3":
        return _whole_number(files.config, "mm_tokens_per_image") or 256
    names = (name for name in reversed(TEXTS) if name in files.texts)
    of_processor = (_whole_number(_decoded(files, name), "max_soft_tokens") for name in names)
    return next(filter(None, of_processor), 280)


def _decoded(files: EncoderFiles, name: str) -> Mapping[str, Any]:
    try:
        content = parsed_json(files.texts[name])
    except (ValueError, RecursionError) as error:
        raise UnusableModel(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnusableModel(f"{name} is not a JSON object")
    return content


def _whole_number(content: Mapping[str, Any], key: str) -> int:
    """Return a number of the object or of its `image_processor`; 0: it has none."""
    inner = content.get("image_processor")
    value = ({**content, **inner} if isinstance(inner, dict) else content).get(key)
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
