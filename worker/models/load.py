"""Loads a model from a path, ready to compute, and makes the model card that describes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from protocol.config.worker import WeightForm
from protocol.model_card import ModelCard
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.layers.mlp import ExpertMlp
from worker.loading.digest import digest
from worker.loading.gguf_file import GGUFFile
from worker.loading.gguf_weights import GGUFWeights
from worker.loading.header import ModelHeader, read_header
from worker.loading.huggingface import SafetensorsWeights
from worker.loading.weights import WeightSource, load_weights
from worker.models.decoder import DecoderModel, DecoderWeights
from worker.models.spec import ModelSpec
from worker.models.weight_layout import fitting, maker, settle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute."""

    model: DecoderModel
    card: ModelCard
    spec: ModelSpec
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
    spec = header.spec
    kernels = fitting(kernels or TorchKernels(), spec)
    make = maker(kernels, weights)
    source = open_weights(header)
    loaded = load_weights(header.tensors, source, dtype=dtype, device=device, make=make)
    costs = settle(spec, loaded, dtype, kernels, measurements)
    card = _card(header, loaded, dtype)
    return LoadedModel(DecoderModel(spec, loaded, kernels), card, spec, costs)


def open_weights(header: ModelHeader) -> WeightSource:
    """Return the source that reads the weights of the model with this header."""
    if isinstance(header.files, GGUFFile):
        return GGUFWeights(header.files)
    return SafetensorsWeights(header.files)


def _card(header: ModelHeader, weights: DecoderWeights, dtype: torch.dtype) -> ModelCard:
    text = header.text
    memory = {tensor.data_ptr(): tensor.nbytes for tensor in weights.tensors()}
    return ModelCard(
        name=header.name,
        architecture=header.spec.architecture,
        digest=digest(header.paths, text.tokenizer, repr(header.spec).encode()),
        vocab_size=header.spec.vocab_size,
        context_tokens=header.spec.context_tokens,
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
        num_parameters=_num_parameters(weights, tied=header.spec.tied_embeddings),
        weights_bytes=sum(memory.values()),
        license=text.license,
    )


def _num_parameters(weights: DecoderWeights, *, tied: bool) -> int:
    """Return the number of parameters. A tied head is not counted twice."""
    total = weights.embedding.numel()
    total += 0 if weights.positions is None else weights.positions.numel()
    total += 0 if tied else weights.head.num_weights
    norms = [weights.norm, *(norm for layer in weights.layers for norm in layer.norms)]
    total += sum(tensor.numel() for norm in norms for tensor in norm.tensors())
    for layer in weights.layers:
        total += sum(getattr(owner, name).num_weights for owner, name in layer.linears)
        if isinstance(layer.mlp, ExpertMlp):
            total += layer.mlp.router.num_weights
    return total
