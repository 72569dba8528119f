"""`python -P -m worker.facts [MODEL]`: what a worker would find here and choose, as JSON.

It asks the functions that a worker asks when it starts, so it cannot say anything else. A model's
headers are read, its weights are not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import torch

from protocol.facts import MachineFacts, ModelFacts
from worker import device as machine
from worker.kv_cache import block_bytes
from worker.loading.errors import UnusableModel
from worker.loading.header import read_header
from worker.memory import free_bytes
from worker.models.config import LlamaConfig

TELLING_FLAGS = frozenset(
    {"avx2", "fma", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}
    | {"neon", "asimd", "sve", "bf16", "i8mm"}
)
"""Of all CPU features, those on which speed or precision depend; the second line is ARM's."""


def machine_facts(model: Path | None) -> MachineFacts:
    device = machine.choose_device("auto")
    flags = machine.cpu_flags()
    dtype = machine.choose_dtype("auto", device, cpu_flags=flags)
    cores, quota = machine.allowed_cores(), machine.cpu_quota()
    facts = MachineFacts(
        torch=str(torch.__version__),
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        device_id=machine.identity_of(device) or "",
        dtype=str(dtype).removeprefix("torch."),
        cpu=cpu_name(),
        cpu_flags=sorted(flags & TELLING_FLAGS),
        cores=cores,
        quota=quota,
        threads=machine.choose_threads(0, cores=cores, quota=quota),
        free_bytes=free_bytes(device),
    )
    if model is None:
        return facts
    try:
        return msgspec.structs.replace(facts, model=model_facts(model, dtype))
    except UnusableModel as error:
        return msgspec.structs.replace(facts, model_error=error.message)


def model_facts(path: Path, dtype: torch.dtype) -> ModelFacts:
    """Raises UnusableModel, saying why in a line."""
    header = read_header(path)
    config = header.config
    return ModelFacts(
        name=header.name,
        architecture=config.architecture,
        context_tokens=config.context_tokens,
        weights_bytes=num_weights(config) * dtype.itemsize,
        token_bytes=block_bytes(config.num_layers, 1, config.num_kv_heads, config.head_dim, dtype),
    )


def num_weights(config: LlamaConfig) -> int:
    """Numbers in all matrices and norms; biases, where a model has them, are too few to matter."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = config.hidden * (2 * heads + 2 * kv_heads)
    mlp = 3 * config.hidden * config.intermediate
    layers = config.num_layers * (attention + mlp + 2 * config.hidden)
    tables = 1 if config.tied_embeddings else 2
    return layers + tables * config.vocab_size * config.hidden + config.hidden


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the system spells it; empty where it does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    named = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in named if key.strip() == "model name"), "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="worker.facts")
    parser.add_argument("model", type=Path, nargs="?")
    facts = machine_facts(parser.parse_args().model)
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
