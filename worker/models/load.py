"""From a path to a model that is ready to compute, and the card that describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from protocol.config.worker import WeightForm
from protocol.model_card import ModelCard
from worker.kernels.base import Kernels
from worker.kernels.twin import TorchKernels
from worker.loading.digest import digest
from worker.loading.errors import UnusableModel
from worker.loading.files import ModelFiles
from worker.loading.gguf_llama import read_gguf
from worker.loading.huggingface import PICKLES, read_directory
from worker.loading.weights import load_llama
from worker.models.config import LlamaConfig
from worker.models.forms import fitting, maker, settle
from worker.models.llama import Llama, LlamaWeights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """step_costs: see WorkerReady."""

    model: Llama
    card: ModelCard
    config: LlamaConfig
    step_costs: list[tuple[int, float]] = field(default_factory=list)


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None = None,
    weights: WeightForm = "auto",
    measurements: Path | None = None,
) -> LoadedModel:
    """From a Hugging Face directory or a .gguf file. Raises UnusableModel, saying why in a line.

    kernels        torch's, if none are given; they must fit the model, or torch's are used
    measurements   folder where those of other starts are kept
    """
    files = read_files(Path(path))
    kernels = fitting(kernels or TorchKernels(), files.config)
    make = maker(kernels, weights)
    loaded = load_llama(files.config, files.weights, dtype=dtype, device=device, make=make)
    costs = settle(files.config, loaded, dtype, kernels, measurements)
    card = _card(files, loaded, dtype)
    return LoadedModel(Llama(files.config, loaded, kernels), card, files.config, costs)


def read_files(path: Path) -> ModelFiles:
    """Headers, and where the weights are. Raises UnusableModel, saying why in a line."""
    if path.is_dir():
        return read_directory(path)
    if path.suffix in PICKLES:
        raise UnusableModel(f"{path} is a pickle file, which can run code when read: not supported")
    if not path.is_file():
        raise UnusableModel(f"{path} does not exist")
    return read_gguf(path)


def _card(files: ModelFiles, weights: LlamaWeights, dtype: torch.dtype) -> ModelCard:
    text = files.text
    memory = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(weights)}
    return ModelCard(
        name=files.name,
        architecture=files.config.architecture,
        digest=digest(files.paths, text.tokenizer, repr(files.config).encode()),
        vocab_size=files.config.vocab_size,
        context_tokens=files.config.context_tokens,
        tokenizer=text.tokenizer,
        eos_token_ids=text.eos_token_ids,
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
        special_tokens=text.special_tokens,
        chat_template=text.chat_template,
        response_template=text.response_template,
        defaults=text.defaults,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=_num_parameters(weights, tied=files.config.tied_embeddings),
        weights_bytes=sum(memory.values()),
        license=text.license,
    )


def _tensors(weights: LlamaWeights) -> Iterator[Tensor]:
    """All memory of the weights; what is held twice comes twice."""
    yield weights.embedding
    yield weights.norm
    yield from weights.head.tensors()
    for layer in weights.layers:
        yield layer.attention_norm
        yield layer.mlp_norm
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield from linear.tensors()


def _num_parameters(weights: LlamaWeights, *, tied: bool) -> int:
    """A tied head is the embedding."""
    total = weights.embedding.numel() + weights.norm.numel()
    total += 0 if tied else weights.head.num_weights
    for layer in weights.layers:
        total += layer.attention_norm.numel() + layer.mlp_norm.numel()
        total += sum(
            linear.num_weights for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
    return total
