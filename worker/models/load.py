"""From a path to a model that is ready to compute, and the card that describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protocol.model_card import ModelCard
from worker.loading.digest import digest
from worker.loading.errors import UnusableModel
from worker.loading.files import ModelFiles
from worker.loading.gguf_llama import read_gguf
from worker.loading.huggingface import PICKLES, read_directory
from worker.loading.weights import load_llama
from worker.models.config import LlamaConfig
from worker.models.llama import Llama, LlamaWeights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Llama
    card: ModelCard
    config: LlamaConfig


def load_model(path: str | Path, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """From a Hugging Face directory or a .gguf file. Raises UnusableModel, saying why in a line."""
    files = read_files(Path(path))
    weights = load_llama(files.config, files.weights, dtype=dtype, device=device)
    card = _card(files, weights, dtype)
    return LoadedModel(Llama(files.config, weights), card, files.config)


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
    sizes = [tensor.numel() for tensor in _tensors(weights)]
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
        num_parameters=sum(sizes),
        weights_bytes=sum(sizes) * dtype.itemsize,
        license=text.license,
    )


def _tensors(weights: LlamaWeights) -> Iterator[Tensor]:
    """Every tensor once: a tied head is the embedding."""
    yield weights.embedding
    yield weights.norm
    if weights.head is not weights.embedding:
        yield weights.head
    for layer in weights.layers:
        yield layer.attention_norm
        yield layer.mlp_norm
        for projection in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield projection.weight
            if projection.bias is not None:
                yield projection.bias
