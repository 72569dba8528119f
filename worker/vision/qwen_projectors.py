"""The image encoders of Qwen's families in mmproj files (projectors.py)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from worker.checkpoint.gguf_file import ARCHITECTURE
from worker.spec.fields import Fields
from worker.vision.mmproj_header import (
    SWAPPED,
    Config,
    MmprojHeader,
    Projector,
    Stored,
    with_endings,
)

WITHOUT_DEEPSTACK = ("qwen35", "qwen35moe")
"""Architectures of models whose layers add no rows of an image."""
MAX_PIXELS = 1 << 30
"""Most pixels of an image that are accepted from a file."""


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
        header.check_squares("mm.0.weight", "spatial_merge_size", merge)
        least, most = self._num_pixels(header, (header.patch * merge) ** 2)
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
            "size": {"shortest_edge": least, "longest_edge": most},
            "patch_size": header.patch,
            "temporal_patch_size": 2,
            "merge_size": merge,
            **header.colours(),
        }
        return config, processor, {}

    def _num_pixels(self, header: MmprojHeader, of_row: int) -> tuple[int, int]:
        """Return the fewest and most pixels of an image.

        of_row   number of pixels of a row
        """
        least, most = (min(count * of_row, MAX_PIXELS) for count in self.num_rows)
        most = header.size("image_max_pixels", most, most=MAX_PIXELS)
        least = header.size("image_min_pixels", min(least, most), most=MAX_PIXELS)
        if least > most:
            raise header.wrong(
                f"clip.vision.image_min_pixels is {least:,}, but images have at most {most:,}"
            )
        return least, most

    def tensors(self, header: MmprojHeader) -> dict[str, Stored]:
        modules = {f"merger.{theirs}": ours for theirs, ours in self.merger.items()}
        for layer in range(header.num_layers):
            for theirs, ours in self.layer.items():
                ours = SWAPPED.get(ours, ours) if header.is_swapped else ours
                modules[f"blocks.{layer}.{theirs}"] = f"v.blk.{layer}.{ours}"
        found = with_endings({f"visual.{theirs}": ours for theirs, ours in modules.items()})
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

    def check(self, header: MmprojHeader, model: Fields) -> None:
        # Models of one width may differ only in this: rows would be left out, or be of no use.
        found, architecture = len(header.added_layers), model.text(ARCHITECTURE)
        expected = model.integer(f"{architecture}.n_deepstack_layers", found)
        if architecture in WITHOUT_DEEPSTACK:
            expected = 0
        if found != expected:
            raise header.of_another_model(
                f"it makes rows for {found} layers of its model (DeepStack), and "
                f"this model reads them in {expected}"
            )

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
        found = with_endings({f"visual.{theirs}": ours for theirs, ours in modules.items()})
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
