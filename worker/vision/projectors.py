"""The encoders of mmproj files, as llama.cpp's converter writes them. Needs no torch.

The metadata are translated to the files that a directory of safetensors has, and the names of the
tensors to those of transformers' classes. So the encoder, the memory plan and the gateway's image
processor are the same for both formats. Sizes that tensors have are read from them, and other
numbers are compared with them. So most damaged files are refused without torch, and the rest by
ImageTower, which compares the shapes of all tensors before it allocates memory. Settings that a
file does not have are those of the published models.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.errors import UnusableModel
from worker.spec.fields import Fields
from worker.vision.mmproj_header import (
    EPSILON,
    MAX_PIXELS_ACROSS,
    SWAPPED,
    Config,
    MmprojHeader,
    Projector,
    Stored,
    with_endings,
)
from worker.vision.qwen_projectors import MergedProjector, Qwen2Projector, WindowedProjector

_OF_SIGLIP_LAYER = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_OF_PIXTRAL_LAYER = {
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
INTERLEAVED = ("attn_q", "attn_k")
"""Matrices of Pixtral whose rows are interleaved."""


def _siglip_config(header: MmprojHeader, image: int) -> Config:
    return header.sizes() | {
        "num_hidden_layers": header.num_layers,
        "num_attention_heads": header.num_heads,
        "image_size": image,
        "layer_norm_eps": header.fields.positive(EPSILON, 1e-6),
    }


def _siglip_tensors(header: MmprojHeader, prefix: str) -> dict[str, Stored]:
    modules = {"embeddings.patch_embedding": "v.patch_embd", "post_layernorm": "v.post_ln"}
    for layer in range(header.num_layers):
        for theirs, ours in _OF_SIGLIP_LAYER.items():
            ours = SWAPPED.get(ours, ours) if header.is_swapped else ours
            modules[f"encoder.layers.{layer}.{theirs}"] = f"v.blk.{layer}.{ours}"
    found = with_endings({prefix + theirs: ours for theirs, ours in modules.items()})
    found[f"{prefix}embeddings.position_embedding.weight"] = Stored(("v.position_embd.weight",))
    return found


class TiledProjector(Projector):
    """SmolVLM and Idefics 3."""

    model_type = "idefics3"
    architectures = frozenset({"llama"})
    placeholders = ("<image>",)
    last = ("mm.model.fc.weight", 0)

    def texts(self, header: MmprojHeader) -> tuple[Config, Config, Config]:
        image, scale = header.size("image_size"), header.size("projector.scale_factor", 2)
        header.check_squares(self.last[0], "projector.scale_factor", scale)
        longest = header.size("preproc_image_size", min(4 * image, MAX_PIXELS_ACROSS))
        config = {
            "model_type": self.model_type,
            "image_token_id": header.pad,
            "scale_factor": scale,
            "text_config": header.text_config("llama"),
            "vision_config": _siglip_config(header, image),
        }
        processor = {
            "size": {"longest_edge": longest},
            "max_image_size": {"longest_edge": image},
            "do_image_splitting": True,
            **header.colours(),
        }
        return config, processor, {"image_seq_len": header.merged(header.side(image), scale)}

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        return _siglip_tensors(header, "vision_model.") | {
            "connector.modality_projection.proj.weight": Stored((self.last[0],))
        }


class PooledProjector(Projector):
    """Gemma 3."""

    model_type = "gemma3"
    architectures = frozenset({"gemma3"})
    # Files whose vocabulary is that of the text have no placeholder.
    placeholders = ("<image_soft_token>", "<unused0>")
    last = ("mm.input_projection.weight", 1)

    def texts(self, header: MmprojHeader) -> tuple[Config, Config, Config]:
        image = header.size("image_size")
        num_rows = header.merged(header.side(image), header.size("projector.scale_factor", 4))
        vision = _siglip_config(header, image) | {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        }
        config = {
            "model_type": self.model_type,
            "image_token_index": header.pad,
            "mm_tokens_per_image": num_rows,
            "text_config": header.text_config("gemma3_text"),
            "vision_config": vision,
        }
        processor = {"size": {"height": image, "width": image}, **header.colours()}
        return config, processor, {"image_seq_length": num_rows}

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        return _siglip_tensors(header, "vision_tower.") | {
            "multi_modal_projector.mm_input_projection_weight": Stored((self.last[0],)),
            "multi_modal_projector.mm_soft_emb_norm.weight": Stored(
                ("mm.soft_emb_norm.weight",), added=1.0
            ),
        }


class LineProjector(Projector):
    """Mistral 3: lines of patches, of which squares are merged."""

    model_type = "mistral3"
    architectures = frozenset({"llama", "mistral3"})
    placeholders = ("[IMG]",)
    last = ("mm.2.weight", 0)

    def check(self, header: MmprojHeader, model: Fields) -> None:
        if "clip.vision.spatial_merge_size" not in header.fields:
            raise UnusableModel(
                f"{header.source}: Pixtral without merging of patches is not supported",
                remedy="serve text only with --mmproj none",
            )

    def texts(self, header: MmprojHeader) -> tuple[Config, Config, Config]:
        image, merge = header.size("image_size"), header.size("spatial_merge_size")
        header.check_squares("mm.patch_merger.weight", "spatial_merge_size", merge)
        vision = header.sizes() | {
            "model_type": "pixtral",
            "num_hidden_layers": header.num_layers,
            "num_attention_heads": header.num_heads,
            "head_dim": header.hidden // header.num_heads,
            "image_size": image,
            "hidden_act": "silu" if header.fields.flag("clip.use_silu", False) else "gelu",
        }
        epsilon = header.fields.positive(EPSILON, 1e-5)
        config = {
            "model_type": self.model_type,
            "image_token_index": header.pad,
            "spatial_merge_size": merge,
            "multimodal_projector_bias": header.has("mm.1.bias"),
            "text_config": header.text_config("mistral") | {"rms_norm_eps": epsilon},
            "vision_config": vision,
        }
        processor = {
            "size": {"longest_edge": image},
            "patch_size": {"height": header.patch, "width": header.patch},
            **header.colours(),
        }
        return config, processor, {"patch_size": header.patch, "spatial_merge_size": merge}

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        modules = {
            "vision_tower.patch_conv": "v.patch_embd",
            "vision_tower.ln_pre": "v.pre_ln",
            "multi_modal_projector.norm": "mm.input_norm",
            "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
            "multi_modal_projector.linear_1": "mm.1",
            "multi_modal_projector.linear_2": "mm.2",
        }
        for layer in range(header.num_layers):
            for theirs, ours in _OF_PIXTRAL_LAYER.items():
                name = f"vision_tower.transformer.layers.{layer}.{theirs}"
                modules[name] = f"v.blk.{layer}.{ours}"
        for name in modules.values():
            rows = header.tensor(f"{name}.weight").shape[0]
            if name.endswith(INTERLEAVED) and rows % (2 * header.num_heads):
                raise header.wrong(f"{name!r} has {rows} rows for {header.num_heads} heads")
        found = {
            f"{theirs}.weight": Stored(
                (f"{ours}.weight",), heads=header.num_heads * ours.endswith(INTERLEAVED)
            )
            for theirs, ours in modules.items()
        }
        if header.has("mm.1.bias"):
            ends = {f"multi_modal_projector.linear_{end}": f"mm.{end}" for end in (1, 2)}
            found |= with_endings(ends)
        return found


PROJECTORS: Mapping[str, Projector] = {
    "idefics3": TiledProjector(),
    "gemma3": PooledProjector(),
    "pixtral": LineProjector(),
    "qwen2vl_merger": Qwen2Projector(),
    "qwen2.5vl_merger": WindowedProjector(),
    "qwen3vl_merger": MergedProjector(),
}
"""`clip.projector_type` -> how its encoders are read."""
