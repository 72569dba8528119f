"""Loads the head with which a checkpoint proposes tokens (spec/draft_head.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.config.worker import Activations, WeightForm
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_weights import GGUFWeights
from worker.checkpoint.huggingface import SafetensorsWeights
from worker.checkpoint.pinned_ring import copying_to
from worker.checkpoint.random_weights import RandomWeights
from worker.loading.draft_header import read_draft_head
from worker.loading.header import AnyHeader, ModelHeader
from worker.loading.layouts import WeightSource
from worker.loading.weight_layout import fitting, layout
from worker.loading.weights import load_draft_head
from worker.models.decoder import DecoderModel
from worker.models.draft_head import DraftHead
from worker.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head that is ready to compute.

    read_bytes   size of the weights that one entry reads, those of the output head included
    """

    model: DraftHead
    spec: ModelSpec
    read_bytes: int


def load_head(
    header: AnyHeader,
    model: object,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightForm = "auto",
    activations: Activations = "auto",
    rounds_floats: bool = False,
) -> LoadedHead:
    """Load the head of a model. Raises UnusableModel if the files have none, or one that is damaged
    or not supported.

    header   the model's
    model    the loaded model, with which the head shares the embedding and the output head

    The other arguments are those of `load_model`. Copies for steps with many tokens
    (`weights` "both") are not made.
    """
    own = read_draft_head(header)
    assert isinstance(header, ModelHeader)
    assert isinstance(model, DecoderModel)
    spec = own.tensors.spec
    kernels = fitting(model.kernels, spec)
    form = layout(
        kernels,
        "auto" if weights == "both" else weights,
        dtype,
        activations,
        rounds_floats=rounds_floats,
    )
    with copying_to(device) as copy:
        source: WeightSource = RandomWeights()
        if isinstance(header.files, GGUFFile):
            source = GGUFWeights(header.files, copy)
        elif header.files is not None:
            source = SafetensorsWeights(header.files, own.quantized, copy)
        loaded = load_draft_head(
            own.tensors, source, model.weights, dtype=dtype, device=device, layout=form
        )
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.tensors()}
    tensors |= {tensor.data_ptr(): tensor.nbytes for tensor in model.weights.head.tensors()}
    return LoadedHead(DraftHead(spec, loaded, kernels), spec, sum(tensors.values()))
