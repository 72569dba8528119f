"""Loads an encoder: reads its weights, and makes the part of the worker that computes with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from protocol.engine.model_card import ModelCard
from worker.checkpoint.digest import digest
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_weights import GGUFWeights
from worker.checkpoint.huggingface import SafetensorsWeights
from worker.checkpoint.pinned_ring import Copy, copying_to
from worker.checkpoint.random_weights import RandomWeights
from worker.encoders.encoder import Encoder, EncoderLayer, EncoderWeights, ScoreHead
from worker.encoders.header import EncoderHeader
from worker.encoders.modules import DenseSpec, VectorSpec
from worker.encoders.pair_scorer import PairScorer
from worker.encoders.pooling import DenseModule, PairScoreHead, VectorHead
from worker.encoders.spec import EncoderLayerSpec
from worker.encoders.tensors import EncoderLayerTensors, EncoderTensors
from worker.layers.embedding import Embedding
from worker.layers.linear import Dense
from worker.layers.norm import Norm
from worker.loading.layouts import WeightSource
from worker.loading.parts import read_box, read_part
from worker.spec.matrices import FusedMatrix, NormTensor
from worker.spec.share import Box
from worker.spec.tensors import ModelTensors


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder that is ready to compute, and its card.

    vectors   makes the vectors; None: the model scores
    """

    model: Encoder
    vectors: VectorHead | None
    card: ModelCard


def load_encoder(
    header: EncoderHeader, *, dtype: torch.dtype, device: torch.device
) -> LoadedEncoder:
    """Load the weights. Raises UnusableModel if the files are damaged."""
    with torch.inference_mode(), copying_to(device) as copy:
        source = _source(header, copy)
        weights = _EncoderLoader(header.tensors, source, dtype, device).load()
    model = Encoder(header.spec, weights)
    vectors = None
    if header.spec.head is None:
        vectors = vector_head(header.vectors, device)
    text = header.text
    card = ModelCard(
        name=header.name,
        architecture=header.spec.architecture,
        digest=digest(
            [*header.paths, *header.vectors.paths],
            text.tokenizer,
            repr(header.spec).encode(),
            repr(header.encoding).encode(),
        ),
        vocab_size=header.spec.vocab_size,
        context_tokens=header.spec.context_tokens,
        tokenizer=text.tokenizer,
        eos_token_ids=text.eos_token_ids,
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
        special_tokens=text.special_tokens,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=header.tensors.num_parameters,
        weights_bytes=sum(tensor.nbytes for tensor in model.tensors()),
        license=text.license,
        generates=False,
        encoding=header.encoding,
    )
    return LoadedEncoder(model, vectors, card)


def vector_head(spec: VectorSpec, device: torch.device) -> VectorHead:
    """Return the head that turns hidden states into vectors, with its weights in float32."""
    dense = [_dense_module(each, device) for each in spec.dense]
    return VectorHead(spec.pooling, dense, spec.normalizes)


def pair_score_head(
    scorer: PairScorer,
    tensors: ModelTensors,
    source: WeightSource,
    embedding: Embedding,
    device: torch.device,
) -> PairScoreHead:
    """Return the head that computes a decoder's scores.

    embedding   the model's embedding, already read; its rows may also be those of the head
    """
    if scorer.tensor == tensors.embedding:
        rows = embedding(torch.tensor(scorer.rows, device=device)).float()
    else:
        # The output head may have a row for every token, so only the rows that score are read.
        whole = (scorer.num_rows, tensors.spec.hidden)
        rows = torch.empty(len(scorer.rows), tensors.spec.hidden, device=device)
        for place, row in enumerate(scorer.rows):
            box = Box((range(row, row + 1), range(whole[1])), whole)
            read_box(source, scorer.tensor, rows[place : place + 1], box)
    weight = rows[:1] if scorer.minus is None else rows[:1] - rows[1:]
    return PairScoreHead(weight.clone(), scorer.has_sigmoid)


def _dense_module(spec: DenseSpec, device: torch.device) -> DenseModule:
    with safe_open(spec.file, framework="pt") as file:
        weight = file.get_tensor("linear.weight").to(device, torch.float32)
        bias = None
        if spec.has_bias:
            bias = file.get_tensor("linear.bias").to(device, torch.float32)
    return DenseModule(Dense(weight, bias), spec.activation)


def _source(header: EncoderHeader, copy: Copy) -> WeightSource:
    if header.files is None:
        return RandomWeights()
    if isinstance(header.files, GGUFFile):
        return GGUFWeights(header.files, copy)
    return SafetensorsWeights(header.files, None, copy)


class _EncoderLoader:
    def __init__(
        self,
        tensors: EncoderTensors,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tensors = tensors
        self._source = source
        self._dtype = dtype
        self._device = device

    def load(self) -> EncoderWeights:
        tensors, spec = self._tensors, self._tensors.spec
        head = None
        if tensors.head is not None and spec.head is not None:
            parts = tensors.head
            norm = self._norm_or_none(parts.norm)
            head = ScoreHead(spec.head, self._linear(parts.dense), norm, self._linear(parts.out))
        return EncoderWeights(
            embedding=self._matrix(tensors.embedding),
            positions=self._table(tensors.positions),
            token_types=self._table(tensors.token_types),
            offset_bias=self._table(tensors.offset_bias),
            embedding_norm=self._norm(tensors.embedding_norm),
            layers=[
                self._layer(layer, tensors.layer(index)) for index, layer in enumerate(spec.layers)
            ],
            norm=self._norm_or_none(tensors.final_norm),
            head=head,
        )

    def _layer(self, spec: EncoderLayerSpec, tensors: EncoderLayerTensors) -> EncoderLayer:
        return EncoderLayer(
            spec=spec,
            attention_norm=self._norm_or_none(tensors.attention_norm),
            qkv=self._linear(tensors.qkv),
            q_norm=self._norm_or_none(tensors.q_norm),
            k_norm=self._norm_or_none(tensors.k_norm),
            output=self._linear(tensors.output),
            mlp_norm=self._norm(tensors.mlp_norm),
            gate_up=self._linear(tensors.gate_up),
            down=self._linear(tensors.down),
        )

    def _table(self, matrix: FusedMatrix | None) -> Tensor | None:
        return None if matrix is None else self._matrix(matrix)

    def _linear(self, matrix: FusedMatrix) -> Dense:
        bias = None
        if matrix.has_bias:
            bias = self._empty(matrix.rows)
            targets = torch.split(bias, [part.rows for part in matrix.parts])
            for part, target in zip(matrix.parts, targets, strict=True):
                read_part(self._source, part.bias, target, part, None)
        return Dense(self._matrix(matrix), bias)

    def _matrix(self, matrix: FusedMatrix) -> Tensor:
        whole = self._empty(matrix.rows, matrix.columns)
        targets = torch.split(whole, [part.rows for part in matrix.parts])
        for part, target in zip(matrix.parts, targets, strict=True):
            read_part(self._source, part.weight, target, part, matrix.columns)
        return whole

    def _norm_or_none(self, tensor: NormTensor | None) -> Norm | None:
        return None if tensor is None else self._norm(tensor)

    def _norm(self, tensor: NormTensor) -> Norm:
        weight = self._empty(tensor.size)
        self._source.read_into(f"{tensor.name}.weight", weight)
        bias = None
        if tensor.has_bias:
            bias = self._empty(tensor.size)
            self._source.read_into(f"{tensor.name}.bias", bias)
        return Norm(self._tensors.spec.norm, weight, bias)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
