"""The encoders of mmproj files, as llama.cpp's converter writes them. Needs no torch.

The metadata are translated to the files that a directory of safetensors has, and the names of the
tensors to those of transformers' classes. So the encoder, the memory plan and the gateway's image
processor are the same for both formats. Sizes that tensors have are read from them, so a damaged
number cannot make the encoder larger than its file. Settings that a file does not have are those of
the published models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.checkpoint.gguf_file import GGUFFile, TensorInfo
from worker.errors import UnusableModel
from worker.spec.fields import Fields

EPSILON = "clip.vision.attention.layer_norm_epsilon"
MAX_PIXELS_ACROSS = 1 << 14
"""Largest edge of an image that is accepted from a file."""
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """How a file holds a tensor of transformers' class: in one tensor or in several."""

    names: tuple[str, ...]
    #: What the converter has added to it.
    added: float = 0.0
    #: Whether the rows of several tensors follow each other. Else the tensors follow each other on
    #: a further axis, the third one.
    joins_rows: bool = False


class MmprojHeader:
    """The metadata and tensors of an mmproj file, and the facts of its model that it depends on.

    width    width of the model's hidden states
    pad      id of the placeholder

    The constructor and the methods raise UnusableModel, which names the key or the tensor.
    """

    def __init__(self, file: GGUFFile, width: int, pad: int) -> None:
        self._source = str(file.path)
        self.fields = Fields(file.metadata, self._source)
        self.width, self.pad = width, pad
        self._file = file
        self.hidden, _, self.patch, _ = self.shape("v.patch_embd.weight", 4)
        self.num_layers = 0
        while f"v.blk.{self.num_layers}.ln1.weight" in file.tensors:
            self.num_layers += 1
        #: Whether the names of the two matrices of an MLP are swapped, as in files of older
        #: converters.
        first = self.shape("v.blk.0.ffn_up.weight", 2)
        self.is_swapped = first[0] == self.hidden != first[1]
        self.inner = first[self.is_swapped]

    def wrong(self, why: str) -> UnusableModel:
        return UnusableModel(f"{self._source}: {why}")

    def tensor(self, name: str) -> TensorInfo:
        if name not in self._file.tensors:
            raise self.wrong(f"it has no tensor {name!r}")
        return self._file.tensors[name]

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        shape = self.tensor(name).shape
        if len(shape) != num_dims:
            raise self.wrong(f"{name!r} must have {num_dims} axes")
        return shape

    def size(self, name: str, default: int | None = None, *, most: int = MAX_PIXELS_ACROSS) -> int:
        """Return the number `clip.vision.NAME`, from 1 to `most`."""
        key = f"clip.vision.{name}"
        value = self.fields.integer(key, *([] if default is None else [default]))
        if not 1 <= value <= most:
            raise self.wrong(f"{key} is {value}; it must be from 1 to {most:,}")
        return value

    @property
    def num_positions(self) -> int:
        return self.shape("v.position_embd.weight", 2)[0]

    @property
    def added_layers(self) -> list[int]:
        """Numbers of the layers after which rows are made that the first layers of the model add
        (DeepStack)."""
        names = self._file.tensors
        return [n for n in range(self.num_layers) if f"v.deepstack.{n}.norm.weight" in names]

    def side(self, image: int) -> int:
        """Return the number of patches in a row of an image of `image` pixels."""
        side = image // self.patch
        if side * side != self.num_positions:
            raise self.wrong(
                f"it has {self.num_positions} positions, but clip.vision.image_size {image} and "
                f"patches of {self.patch} pixels make {side * side}"
            )
        return side

    def merged(self, side: int, scale: int) -> int:
        """Return the number of rows of an image of `side` x `side` patches, of which `scale` x
        `scale` become one."""
        if side // scale < 1:
            raise self.wrong(f"{scale} patches in a row do not fit into {side}")
        return (side // scale) ** 2

    def colours(self) -> Config:
        """Return the mean and the deviation of each colour."""
        read = {"image_mean": Fields.number, "image_std": Fields.positive}
        found: Config = {}
        for name, number in read.items():
            key = f"clip.vision.{name}"
            values = self.fields.get(key, [0.5] * 3)
            if not isinstance(values, list) or len(values) != 3:
                raise self.wrong(f"{key} must have three numbers")
            each = Fields(
                {f"{key}[{index}]": value for index, value in enumerate(values)}, self._source
            )
            found[name] = [number(each, f"{key}[{index}]") for index in range(3)]
        return found

    def text_config(self, model_type: str) -> Config:
        """Return the config of a text part of the right width, which is never computed."""
        return {
            "model_type": model_type,
            "hidden_size": self.width,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
        }

    @property
    def num_heads(self) -> int:
        heads = self.size("attention.head_count")
        if self.hidden % heads:
            raise self.wrong(f"{heads} heads do not divide a width of {self.hidden}")
        return heads

    def sizes(self) -> Config:
        """Return the keys of the encoder's config that have the same name in all families."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "patch_size": self.patch,
        }


def _with_endings(names: Mapping[str, str]) -> dict[str, Stored]:
    """Return theirs -> how it is stored, for modules that have a weight and a bias."""
    return {
        f"{theirs}.{ending}": Stored((f"{ours}.{ending}",))
        for theirs, ours in names.items()
        for ending in ("weight", "bias")
    }


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
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


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
            ours = _SWAPPED.get(ours, ours) if header.is_swapped else ours
            modules[f"encoder.layers.{layer}.{theirs}"] = f"v.blk.{layer}.{ours}"
    found = _with_endings({prefix + theirs: ours for theirs, ours in modules.items()})
    found[f"{prefix}embeddings.position_embedding.weight"] = Stored(("v.position_embd.weight",))
    return found


class Projector(ABC):
    """How the encoders of one `clip.projector_type` are read."""

    #: `model_type` whose classes compute the encoder and its image processor.
    model_type: str
    #: `general.architecture` of the models.
    architectures: frozenset[str]
    #: Texts of the placeholder. The first one that the vocabulary has is used. Nothing depends on
    #: which it is, but it should be no part of ordinary texts.
    placeholders: tuple[str, ...]
    #: The tensor that makes the model's rows, and the axis of these.
    last: tuple[str, int]

    @abstractmethod
    def texts(self, header: MmprojHeader) -> tuple[Config, Config, Config]:
        """Return what a directory has in the files TEXTS."""

    @abstractmethod
    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        """Return `tower_key` -> how the file holds the tensor."""


class TiledProjector(Projector):
    """SmolVLM and Idefics 3."""

    model_type = "idefics3"
    architectures = frozenset({"llama"})
    placeholders = ("<image>",)
    last = ("mm.model.fc.weight", 0)

    def texts(self, header: MmprojHeader) -> tuple[Config, Config, Config]:
        image, scale = header.size("image_size"), header.size("projector.scale_factor", 2)
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


class GridProjector(Projector):
    """Qwen's families: images of any size, of which squares of patches become a row."""

    placeholders = ("<|image_pad|>",)
    last = ("mm.2.weight", 0)
    #: Fewest and most rows of an image, if the file has no numbers of pixels.
    num_rows: tuple[int, int]
    #: Modules of a layer -> their names in the file.
    layer: Mapping[str, str]
    #: The same for the modules after the layers.
    merger: Mapping[str, str]

    @abstractmethod
    def vision(self, header: MmprojHeader) -> Config:
        """Return the keys of the encoder's config that are not those of all these families."""

    def texts(self, header: MmprojHeader) -> tuple[Config, Config, Config]:
        merge = header.size("spatial_merge_size", 2)
        least, most = (count * (header.patch * merge) ** 2 for count in self.num_rows)
        shared = {
            "depth": header.num_layers,
            "num_heads": header.num_heads,
            "spatial_merge_size": merge,
            "temporal_patch_size": 2,
            "out_hidden_size": header.width,
        }
        config = {
            "model_type": self.model_type,
            "image_token_id": header.pad,
            "text_config": header.text_config(f"{self.model_type}_text"),
            "vision_config": header.sizes() | shared | self.vision(header),
        }
        processor = {
            "size": {
                "shortest_edge": header.size("image_min_pixels", least, most=1 << 30),
                "longest_edge": header.size("image_max_pixels", most, most=1 << 30),
            },
            "patch_size": header.patch,
            "temporal_patch_size": 2,
            "merge_size": merge,
            **header.colours(),
        }
        return config, processor, {}

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        modules = {f"merger.{theirs}": ours for theirs, ours in self.merger.items()}
        for layer in range(header.num_layers):
            for theirs, ours in self.layer.items():
                ours = _SWAPPED.get(ours, ours) if header.is_swapped else ours
                modules[f"blocks.{layer}.{theirs}"] = f"v.blk.{layer}.{ours}"
        found = _with_endings({f"visual.{theirs}": ours for theirs, ours in modules.items()})
        frames = ("v.patch_embd.weight", "v.patch_embd.weight.1")
        return found | {"visual.patch_embed.proj.weight": Stored(frames)}


class MergedProjector(GridProjector):
    """Qwen3-VL and Qwen3.5, dense and with experts. Their encoders are alike, but that of Qwen3.5
    makes no rows for further layers."""

    model_type = "qwen3_vl"
    architectures = frozenset({"qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"})
    num_rows = 64, 16384
    layer = {
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    }
    merger = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}

    def vision(self, header: MmprojHeader) -> Config:
        return {
            "num_position_embeddings": header.num_positions,
            "deepstack_visual_indexes": header.added_layers,
        }

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        modules = {"patch_embed.proj": "v.patch_embd"}
        for index, layer in enumerate(header.added_layers):
            for theirs, ours in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")):
                modules[f"deepstack_merger_list.{index}.{theirs}"] = f"v.deepstack.{layer}.{ours}"
        found = _with_endings({f"visual.{theirs}": ours for theirs, ours in modules.items()})
        positions = {"visual.pos_embed.weight": Stored(("v.position_embd.weight",))}
        return found | super().tensors(header) | positions


class Qwen2Projector(GridProjector):
    """Qwen2-VL."""

    model_type = "qwen2_vl"
    architectures = frozenset({"qwen2vl"})
    num_rows = 4, 16384
    layer = {
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    }
    merger = {"ln_q": "v.post_ln", "mlp.0": "mm.0", "mlp.2": "mm.2"}

    def vision(self, header: MmprojHeader) -> Config:
        if header.inner % header.hidden:
            raise header.wrong(f"a width of {header.inner} is no multiple of {header.hidden}")
        return {
            "hidden_size": header.width,
            "embed_dim": header.hidden,
            "mlp_ratio": header.inner // header.hidden,
        }

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        return super().tensors(header) | {
            f"visual.blocks.{layer}.attn.qkv.{ending}": Stored(
                tuple(f"v.blk.{layer}.attn_{part}.{ending}" for part in "qkv"), joins_rows=True
            )
            for layer in range(header.num_layers)
            for ending in ("weight", "bias")
        }


class WindowedProjector(Qwen2Projector):
    """Qwen2.5-VL. Most of its layers attend within windows, and its norms have no biases."""

    model_type = "qwen2_5_vl"
    layer = {
        **{name: Qwen2Projector.layer[name] for name in ("norm1", "norm2", "attn.proj")},
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }

    def vision(self, header: MmprojHeader) -> Config:
        interval = header.size("n_wa_pattern")
        return {
            "fullatt_block_indexes": [*range(interval - 1, header.num_layers, interval)],
            "window_size": 112,  # of all published models; files do not store it
        }

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        found = super().tensors(header)
        biases = ("norm1.bias", "norm2.bias", "ln_q.bias")
        return {name: stored for name, stored in found.items() if not name.endswith(biases)}


PROJECTORS: Mapping[str, Projector] = {
    "idefics3": TiledProjector(),
    "gemma3": PooledProjector(),
    "qwen2vl_merger": Qwen2Projector(),
    "qwen2.5vl_merger": WindowedProjector(),
    "qwen3vl_merger": MergedProjector(),
}
"""`clip.projector_type` -> how its encoders are read."""
