"""A GGUF file and an mmproj file of a tiny model of images, as llama.cpp's converter writes them.

The names of tensors come from the package `gguf`, but for those that the converter builds itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    VisionProjectorType,
    get_tensor_name_map,
    quants,
)
from numpy.typing import NDArray

from tests.support.checkpoints import SPECIAL, TEMPLATE, VOCAB, tiny_tokenizer
from tests.support.gguf_files import write_gguf
from worker.checkpoint.gguf_tokens import CONTROL
from worker.spec.wrappers import text_name

Array = NDArray[np.float32]
Kinds = Callable[[str], GGMLQuantizationType]
F32 = GGMLQuantizationType.F32
PLACEHOLDERS = {
    "idefics3": "<image>",
    "gemma3": "<image_soft_token>",
    "mistral3": "[IMG]",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), "<|image_pad|>"),
}
"""`model_type` -> the placeholder, which is the last token."""
MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
TEXTS = {
    "qwen2_vl_text": ("qwen2vl", transformers.Qwen2Config),
    "qwen2_5_vl_text": ("qwen2vl", transformers.Qwen2Config),
    "qwen3_vl_text": ("qwen3vl", transformers.Qwen3Config),
    "qwen3_5_text": ("qwen35", None),
}
"""`model_type` of a text part with M-RoPE -> the architecture of its file, and the config of a
decoder that computes the same; None: its own."""


def write_text(path: Path, model: Any, placeholder: str = "", kind: int = CONTROL) -> Path:
    """Write the text part of a model, and return `path`.

    placeholder   another text of the placeholder
    kind          its type in the vocabulary
    """
    options: dict[str, Any] = {}
    text = model.config.get_text_config()
    metadata: dict[str, Any] = {}
    if text.model_type in TEXTS:
        architecture, decoder_config = TEXTS[text.model_type]
        sections = text.rope_parameters["mrope_section"]
        metadata[f"{architecture}.rope.dimension_sections"] = [*sections, 0]
        if text.model_type == "qwen3_vl_text":
            layers = model.config.vision_config.deepstack_visual_indexes
            metadata[f"{architecture}.n_deepstack_layers"] = len(layers)
        if decoder_config is not None:
            keys = {key: value for key, value in text.to_dict().items() if key != "model_type"}
            text, options = decoder_config(**keys), {"architecture": architecture}
    if text.model_type == "gemma3_text":
        slides = [kind == "sliding_attention" for kind in text.layer_types]
        metadata["gemma3.attention.sliding_window_pattern"] = slides
    # transformers' classes of wrappers and of decoders share the names of a decoder's tensors.
    decoder = transformers.AutoModelForCausalLM.from_config(text).eval()
    decoder.load_state_dict(
        {own: each for name, each in model.state_dict().items() if (own := text_name(name))}
    )

    def add_tokenizer(writer: GGUFWriter) -> None:
        vocab = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
        pieces = [piece for piece, _ in vocab]
        pieces += [f"[PAD{index}]" for index in range(len(pieces), VOCAB - 1)]
        pieces.append(placeholder or PLACEHOLDERS[model.config.model_type])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(pieces)
        kinds = [3 if each in SPECIAL else 5 if each.startswith("[PAD") else 1 for each in pieces]
        writer.add_token_types([*kinds[:-1], kind])
        writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
        writer.add_eos_token_id(0)
        writer.add_chat_template(TEMPLATE)

    return write_gguf(path, decoder, metadata=metadata, tokenizer=add_tokenizer, **options)


def write_mmproj(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType | Kinds = F32,
    changes: Mapping[str, Any] | None = None,
    *,
    skips: str = "",
    swaps: bool = False,
) -> Path:
    """Write the image encoder of a model, and return `path`.

    kind      type of the matrices, or a function from a tensor's name to its type
    changes   other values of metadata; None: the key is left out
    skips     name of a tensor that is left out
    swaps     swap the names of the matrices of MLPs, as older converters do
    """
    config = model.config
    vision = config.vision_config
    writer = GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.get_text_config().hidden_size)
    writer.add_vision_patch_size(vision.patch_size)
    is_oldest = config.model_type == "qwen2_vl"  # its names of the widths differ
    writer.add_vision_embedding_length(vision.embed_dim if is_oldest else vision.hidden_size)
    inner = vision.hidden_size if is_oldest else vision.intermediate_size
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_image_mean([0.5, 0.25, 0.125])
    writer.add_vision_image_std([0.5, 0.5, 0.25])
    match config.model_type:
        case "idefics3":
            writer.add_clip_projector_type(VisionProjectorType.IDEFICS3)
            writer.add_vision_projector_scale_factor(config.scale_factor)
            writer.add_vision_preproc_image_size(4 * vision.image_size)
        case "gemma3":
            writer.add_clip_projector_type(VisionProjectorType.GEMMA3)
            side = int(config.mm_tokens_per_image**0.5)
            scale = vision.image_size // vision.patch_size // side
            if scale != 4:
                writer.add_vision_projector_scale_factor(scale)
        case "mistral3":
            writer.add_clip_projector_type(VisionProjectorType.PIXTRAL)
            writer.add_vision_spatial_merge_size(config.spatial_merge_size)
            if vision.hidden_act == "silu":
                writer.add_vision_use_silu(True)
            else:
                writer.add_vision_use_gelu(True)
        case "qwen2_vl":
            writer.add_clip_projector_type(VisionProjectorType.QWEN2VL)
        case "qwen2_5_vl":
            writer.add_clip_projector_type(VisionProjectorType.QWEN25VL)
            writer.add_vision_use_silu(True)
            writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
        case "qwen3_vl" | "qwen3_5":
            writer.add_clip_projector_type(VisionProjectorType.QWEN3VL)
            writer.add_vision_spatial_merge_size(vision.spatial_merge_size)
            layers = getattr(vision, "deepstack_visual_indexes", ())
            writer.add_vision_is_deepstack_layers([n in layers for n in range(vision.depth)])
    if config.model_type.startswith("qwen"):
        side = getattr(vision, "num_position_embeddings", 1600) ** 0.5
        writer.add_vision_image_size(int(side * vision.patch_size))
        writer.add_vision_block_count(vision.depth)
        writer.add_vision_head_count(vision.num_heads)
        writer.add_vision_attention_layernorm_eps(config.text_config.rms_norm_eps)
    else:
        writer.add_vision_image_size(vision.image_size)
        writer.add_vision_block_count(vision.num_hidden_layers)
        writer.add_vision_head_count(vision.num_attention_heads)
        writer.add_vision_attention_layernorm_eps(getattr(vision, "layer_norm_eps", 1e-5))
    (pairs,) = writer.kv_data
    for key, value in (changes or {}).items():
        pairs.pop(key, None)
        if value is not None:
            add = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
            add[type(value)](key, value)  # type: ignore[operator]
    kinds = kind if callable(kind) else lambda _: kind
    for name, data in _tensors(model):
        if swaps:
            name = re.sub("ffn_(up|down)", lambda found: f"ffn_{_OTHER[found[1]]}", name)
        if name == skips:
            continue
        own = kinds(name) if data.ndim > 1 else F32
        writer.add_tensor(name, quants.quantize(data, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_OTHER = {"up": "down", "down": "up"}


def _tensors(model: Any) -> Iterator[tuple[str, Array]]:
    """Yield (name, content) of each tensor of the encoder."""
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 8)
    layers = getattr(model.config.vision_config, "deepstack_visual_indexes", ())
    for theirs, tensor in model.state_dict().items():
        if text_name(theirs) is not None or ".head." in theirs:
            continue
        data = tensor.numpy().astype(np.float32)
        theirs = theirs.removeprefix("model.").replace("_weight", ".weight")
        if found := re.match(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(.*)", theirs):
            yield f"v.deepstack.{layers[int(found[1])]}.{found[2]}", data
        elif found := re.match(r"visual\.merger\.(norm|linear_fc\d)\.(.*)", theirs):
            yield f"{MERGER[found[1]]}.{found[2]}", data
        elif found := re.match(r"visual\.merger\.mlp\.(\d)\.(.*)", theirs):
            yield f"mm.{found[1]}.{found[2]}", data
        elif ".qkv." in theirs and model.config.model_type.startswith("qwen2"):
            for part, rows in zip("qkv", np.split(data, 3), strict=True):
                name = _name(names, theirs.replace("qkv", part))
                assert name is not None
                yield name, np.ascontiguousarray(rows)
        elif theirs == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", np.ascontiguousarray(data[:, :, 0])
            yield "v.patch_embd.weight.1", np.ascontiguousarray(data[:, :, 1])
        else:
            if re.search(r"layers\.\d+\.attention\.[qk]_proj", theirs):
                halves = data.reshape(
                    model.config.vision_config.num_attention_heads, 2, -1, data.shape[1]
                )
                data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
            if model.config.model_type == "gemma3":
                theirs = theirs.replace("vision_tower.", "vision_tower.vision_model.", 1)
            name = next(filter(None, (_name(names, begin + theirs) for begin in ("", "model."))))
            yield name, data + ("soft_emb_norm" in name)


def _name(names: Any, theirs: str) -> str | None:
    found: str | None = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    return found
