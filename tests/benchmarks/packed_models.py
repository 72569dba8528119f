"""Measures memory and decode steps of quantised models of 0.5 to 3 billion weights.

    python -m tests.benchmarks.packed_models [--shapes NAME,...] [--types NAME,...] [--folder DIR]
        [--no-steps]

The program writes models of published shapes as `tidegate quantize` does, but with random weights,
of which one piece is quantised and repeated. DeepSeek-V2-Lite has three of its 27 layers, and is
written as llama.cpp's converter writes it, because `tidegate quantize` writes no latent attention;
only its loading is measured. The program prints two tables:

- The resident memory and the seconds of a process that loads each file with packed weights.
- The time of a decode step, from token ids to logits, of each type and of Q4_1. Both models are in
  one process, and their steps alternate. A ratio is the median of the ratios of all pairs of steps.

Files of the default shapes and types take 9 GB of disk, and the two models of a pair up to 6 GB of
memory. Without `--folder` the files are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quant_shape_to_byte_shape
from numpy.typing import NDArray
from transformers import AutoConfig

from protocol.tools.quantize import TYPES
from tests.benchmarks.packed_steps import ROWS
from tests.support.checkpoints import tiny_tokenizer
from tests.support.gguf_files import add_metadata
from worker.checkpoint.gguf_header import architecture_names
from worker.device.machine import cpu_name
from worker.loading.header import ModelHeader, read_header
from worker.quantize.tensors import OutputTensor
from worker.quantize.types import quantize
from worker.quantize.writing import write_model
from worker.spec.families.registry import find_family
from worker.spec.tensors import ModelTensors

MIB = 1 << 20
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
    },
    "Llama-3.2-3B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
    },
}
"""Configs of published models."""
LATENT_SHAPES: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 163840,
    }
}
"""The same of models of DeepSeek V2, but for the number of layers."""
LATENT_TYPES = {
    "Q4_1": (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_1),
    "Q4_K_M": (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_0),
    "Q8_0": (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q8_0),
}
"""Type of a file -> that of its matrices, and that of matrices whose rows are no whole number of
blocks of 256."""
COMMON = {"hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 0}
BASE = "Q4_1"
"""The type with whose steps those of all other types are compared."""
ALLOWED_SHARE, ALLOWED_BYTES = 1.1, 300 << 20
"""The goal: resident memory after loading is at most this share of the file's size, plus these
bytes."""


# ---- Writing


class RandomContents:
    """Random weights: the bytes of one quantised piece, repeated as often as a tensor needs. The
    weights of norms are ones."""

    def __init__(self) -> None:
        self._noise = np.random.default_rng(1).normal(0, 0.02, (256, 1024)).astype(np.float32)
        self._pieces: dict[GGMLQuantizationType, NDArray[np.uint8]] = {}

    def __call__(self, tensor: OutputTensor, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        if len(tensor.shape) == 1:
            return np.ones(tensor.shape, np.float32).view(np.uint8)
        return self.matrix(tensor.shape, kind)

    def matrix(self, shape: Sequence[int], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        if kind not in self._pieces:
            self._pieces[kind] = quantize(self._noise, kind).reshape(-1)
        return np.resize(self._pieces[kind], quant_shape_to_byte_shape(shape, kind))


def write_source(folder: Path, config: dict[str, Any]) -> ModelHeader:
    """Write a model directory with a tokenizer and a sparse file of weights, which takes no disk
    space. Return the model's header."""
    config = config | COMMON
    family = find_family(config)
    spec = family.spec(config)
    entries, at = {}, 0
    shapes = dict(ModelTensors(spec, family.names(spec)).tensors())  # tied ones come twice
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + size)}
        at += size
    head = json.dumps(entries).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(weights, 8 + len(head) + at)
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    header = read_header(folder)
    assert isinstance(header, ModelHeader)
    return header


def write_latent(path: Path, sizes: dict[str, Any], kind: str) -> None:
    """Write a DeepSeek V2 of these sizes."""
    config = AutoConfig.for_model("deepseek_v2", **sizes)
    values = config.to_dict() | {"architectures": ["DeepseekV2ForCausalLM"]}
    spec = find_family(values).spec(values)
    usual, other = LATENT_TYPES[kind]
    contents, writer = RandomContents(), GGUFWriter(path, "deepseek2")
    add_metadata(writer, config)
    tensors = ModelTensors(spec, architecture_names("deepseek2", spec))
    for name, shape in dict(tensors.tensors()).items():
        if len(shape) == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, np.full(shape, 0.02, np.float32))
            continue
        own = other if shape[-1] % 256 else usual
        writer.add_tensor(name, contents.matrix(shape, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_models(folder: Path, shape: str, types: Sequence[str]) -> dict[str, Path]:
    """Write the model of a shape in each type, unless all files exist. Return the files by type."""
    paths = {each: folder / f"{shape}.{each}.gguf" for each in types}
    if all(path.exists() for path in paths.values()):
        return paths
    if shape in LATENT_SHAPES:
        for kind, path in paths.items():
            write_latent(path, LATENT_SHAPES[shape], kind)
        return paths
    with tempfile.TemporaryDirectory() as source:
        header = write_source(Path(source), SHAPES[shape])
        for kind, path in paths.items():
            write_model(header, RandomContents(), path, kind, lambda *_: None)
    return paths


def measured(*arguments: object) -> Any:
    """Run packed_steps.py in a new process, and return its JSON."""
    command = [sys.executable, "-m", "tests.benchmarks.packed_steps", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments[0]} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- Tables


def print_loading(shape: str, kind: str, path: Path, found: dict[str, Any]) -> None:
    size = path.stat().st_size
    is_met = found["after"] <= ALLOWED_SHARE * size + ALLOWED_BYTES
    print(
        f"| {shape} {kind} | {size / MIB:,.0f} | {found['weights'] / MIB:,.0f} "
        f"| {found['weights'] / size:.3f} | {found['after'] / MIB:,.0f} "
        f"({found['before'] / MIB:,.0f}) | {'yes' if is_met else 'no'} | {found['seconds']:.1f} |",
        flush=True,
    )


def print_steps(shape: str, kind: str, found: list[dict[str, Any]]) -> None:
    cells = [
        f"{each['base'] * 1e3:,.0f}, {each['other'] * 1e3:,.0f}: {each['ratio']:.2f} "
        f"({each['pairs']} pairs)"
        for each in found
    ]
    print(f"| {shape} {kind} | {' | '.join(cells)} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.packed_models",
        description="Measure memory and decode steps of random models with packed weights.",
    )
    every = SHAPES | LATENT_SHAPES
    parser.add_argument("--shapes", default=",".join(every), help="default: %(default)s")
    parser.add_argument("--types", default="Q4_K_M,Q8_0", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="time for a number of rows")
    parser.add_argument("--no-steps", action="store_true", help="measure memory and loading only")
    parser.add_argument("--folder", type=Path, help="keep the files in this directory, or use them")
    options = parser.parse_args()
    for names, valid in ((options.shapes, every), (options.types, TYPES)):
        for name in names.split(","):
            if name not in valid:
                parser.error(f"{name!r} is not one of {', '.join(valid)}")
    if LATENT_SHAPES.keys() & {*options.shapes.split(",")}:
        for name in {*options.types.split(",")} - LATENT_TYPES.keys():
            parser.error(f"models with latent attention are not written as {name}")
    return options


def main() -> None:
    options = parse()
    shapes, types = options.shapes.split(","), [BASE, *options.types.split(",")]
    types = list(dict.fromkeys(types))
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = time.perf_counter()
        paths = {shape: write_models(folder, shape, types) for shape in shapes}
        print(f"files written in {time.perf_counter() - start:.0f} s")
        print(
            "| model | file, MiB | weights, MiB | ratio | resident (before), MiB | goal | load, s |"
        )
        print("|---|---|---|---|---|---|---|")
        found: dict[str, Any] = {}
        for shape in shapes:
            for kind in types:
                found = measured("load", paths[shape][kind])
                print_loading(shape, kind, paths[shape][kind], found)
        name = cpu_name().partition(",")[0]
        print(f"\n{datetime.now(UTC):%Y-%m-%d}, {name}, {os.cpu_count()} cores, kernels")
        print(f"{found['kernels']}, {found['dtype']}, load average {os.getloadavg()[0]:.1f}")
        if options.no_steps:
            return
        print(
            f"\n| ms of {BASE} and of the type: ratio | {' | '.join(f'{n} rows' for n in ROWS)} |"
        )
        print(f"|---|{'---|' * len(ROWS)}")
        for shape in filter(SHAPES.__contains__, shapes):
            for kind in types[1:]:
                pair = (paths[shape][BASE], paths[shape][kind])
                print_steps(shape, kind, measured("steps", *pair, options.seconds))
        print(f"\nload average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
