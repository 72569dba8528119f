"""Loads a model from a path, ready to compute, and makes the model card that describes it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from protocol.config.worker import WeightForm
from protocol.model_card import ModelCard
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.loading.digest import digest
from worker.loading.gguf_file import GGUFFile
from worker.loading.gguf_llama import GGUFWeights
from worker.loading.header import ModelHeader, read_header
from worker.loading.huggingface import SafetensorsWeights
from worker.loading.weights import WeightSource, load_llama
from worker.models.config import LlamaConfig
from worker.models.llama import Llama, LlamaWeights
from worker.models.weight_layout import fitting, maker, settle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute."""

    model: Llama
    card: ModelCard
    config: LlamaConfig
    #: (rows, seconds that the linears of a step with so many rows take); empty if not measured.
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
    """Load a Hugging Face directory or a .gguf file. Raises UnusableModel.

    kernels        used if they support the model; otherwise, or if None, torch's are used
    weights        form of the weights (weight_layout.py)
    measurements   directory that caches measured times between starts; None disables the cache
    """
    header = read_header(Path(path))
    config = header.config
    if config.window is not None:
        log.warning("the context is limited to the attention window of %d tokens", config.window)
    kernels = fitting(kernels or TorchKernels(), config)
    make = maker(kernels, weights)
    loaded = load_llama(config, open_weights(header), dtype=dtype, device=device, make=make)
    costs = settle(config, loaded, dtype, kernels, measurements)
    card = _card(header, loaded, dtype)
    return LoadedModel(Llama(config, loaded, kernels), card, config, costs)


def open_weights(header: ModelHeader) -> WeightSource:
    """Return the source that reads the weights of the model with this header."""
    if isinstance(header.files, GGUFFile):
        return GGUFWeights(header.files, header.config)
    return SafetensorsWeights(header.files)


def _card(header: ModelHeader, weights: LlamaWeights, dtype: torch.dtype) -> ModelCard:
    text = header.text
    memory = {tensor.data_ptr(): tensor.nbytes for tensor in weight_tensors(weights)}
    return ModelCard(
        name=header.name,
        architecture=header.config.architecture,
        digest=digest(header.paths, text.tokenizer, repr(header.config).encode()),
        vocab_size=header.config.vocab_size,
        context_tokens=header.config.context_tokens,
        tokenizer=text.tokenizer,
        eos_token_ids=text.eos_token_ids,
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
        special_tokens=text.special_tokens,
        chat_template=text.chat_template,
        tool_use_template=text.tool_use_template,
        response_template=text.response_template,
        defaults=text.defaults,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=_num_parameters(weights, tied=header.config.tied_embeddings),
        weights_bytes=sum(memory.values()),
        license=text.license,
    )


def weight_tensors(weights: LlamaWeights) -> Iterator[Tensor]:
    """Yield the tensors of all weights. A tensor that is shared is yielded once for each use."""
    yield weights.embedding
    yield weights.norm
    yield from weights.head.tensors()
    for layer in weights.layers:
        yield layer.attention_norm
        yield layer.mlp_norm
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield from linear.tensors()


def _num_parameters(weights: LlamaWeights, *, tied: bool) -> int:
    """Return the number of parameters, counting a tied head only once."""
    total = weights.embedding.numel() + weights.norm.numel()
    total += 0 if tied else weights.head.num_weights
    for layer in weights.layers:
        total += layer.attention_norm.numel() + layer.mlp_norm.numel()
        total += sum(
            linear.num_weights for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
    return total
