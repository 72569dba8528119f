"""Builds the runners that encode, and the workers of models that only encode. Such a worker has
no slots and no K/V cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.encoding import EncodeInputs
from protocol.engine.model_card import ModelCard
from protocol.wire.arrays import Int32
from protocol.worker.steps import EncodePlan, TokenizerRead, WorkerReady
from worker.attention.base import Attention
from worker.device import cpuinfo, malloc
from worker.device.timing import StartupTiming
from worker.encoders.decoder import DecoderVectors
from worker.encoders.header import EncoderHeader
from worker.encoders.runner import EncoderModel, EncodeRunner
from worker.errors import UnusableModel
from worker.kernels.number_types import number_types
from worker.kv.checkpoint_memory import CheckpointMemory
from worker.loading.decoder import LoadedModel
from worker.loading.encoder import load_encoder
from worker.loading.header import AnyHeader
from worker.models.decoder import DecoderModel
from worker.startup.encoder_memory import check_options, dtype_of, token_budget
from worker.step.runner import Runner
from worker.vision.tower import ImageTower

log = logging.getLogger(__name__)


class Assembled(NamedTuple):
    """A worker that is ready for its first plan.

    runner    executes plans that generate; None: the model only encodes
    encoder   executes plans that encode; None: the model only generates
    states    the checkpoints of recurrent states; None: there are none
    tower     encodes images; None: the worker encodes none
    """

    runner: Runner | None
    encoder: EncodeRunner | None
    ready: WorkerReady
    states: CheckpointMemory | None = None
    tower: ImageTower | None = None


def assemble_encoder(
    config: WorkerConfig,
    timing: StartupTiming,
    header: EncoderHeader,
    device: torch.device,
    on_tokenizer: Callable[[TokenizerRead], object],
) -> Assembled:
    """Build the worker of an encoder."""
    check_options(config)
    header = header.with_pooling(config.pooling)
    is_gpu = device.type != "cpu"
    usual = number_types(config, is_gpu=is_gpu, cpu_flags=cpuinfo.cpu_flags())
    dtype: torch.dtype = getattr(torch, dtype_of(config, header, usual.dtype, is_gpu=is_gpu))
    on_tokenizer(tokenizer_read(header))
    with timing("load weights"):
        loaded = load_encoder(header, dtype=dtype, device=device)
    encoder = EncodeRunner(EncoderModel(loaded.model, loaded.vectors))
    return _only_encodes(config, timing, loaded.card, encoder, device)


def assemble_vectors(
    config: WorkerConfig,
    timing: StartupTiming,
    loaded: LoadedModel,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
) -> Assembled:
    """Build the worker of a decoder that only encodes."""
    check_options(config)
    budget = token_budget(config, is_gpu=device.type != "cpu")
    encoder = decoder_runner(config, loaded, attention, dtype, device, budget)
    return _only_encodes(config, timing, loaded.card, encoder, device)


def _only_encodes(
    config: WorkerConfig,
    timing: StartupTiming,
    card: ModelCard,
    encoder: EncodeRunner,
    device: torch.device,
) -> Assembled:
    """Return the worker of a model that only encodes, after a first step."""
    encoding = card.encoding
    assert encoding is not None
    if config.max_len:
        limit = min(encoding.max_tokens, config.max_len)
        encoding = msgspec.structs.replace(encoding, max_tokens=limit)
        card = msgspec.structs.replace(card, encoding=encoding)
    with timing("warm up"):
        # On a GPU, a step that does not fit into its memory must show now.
        usual = min(2, encoding.max_tokens)
        encode_longest(encoder, usual if device.type == "cpu" else encoding.max_tokens)
    malloc.keep_pages()  # after loading, so that its temporary memory has been returned
    log.info(
        "model %s dtype=%s device=%s weights=%d MiB threads=%d; it encodes inputs of up to %d "
        "tokens",
        card.name,
        card.dtype,
        device,
        card.weights_bytes >> 20,
        torch.get_num_threads(),
        encoding.max_tokens,
    )
    ready = WorkerReady(
        model=card,
        max_len=encoding.max_tokens,
        max_slots=0,
        token_budget=token_budget(config, is_gpu=device.type != "cpu"),
        block_tokens=config.block_tokens,
        num_blocks=2,  # the fewest that an engine takes; no request holds one
        rank=config.rank,
        phases=timing.phases,
    )
    return Assembled(None, encoder, ready)


def longest_input(config: WorkerConfig, card: ModelCard) -> int:
    """Return the most tokens of an input of a model that encodes."""
    assert card.encoding is not None
    return min(config.max_len or card.encoding.max_tokens, card.encoding.max_tokens)


def encode_longest(encoder: EncodeRunner, tokens: int) -> None:
    """Encode one input of `tokens` tokens, and drop the result."""
    one = EncodeInputs(tokens=Int32.of([0] * tokens), lengths=Int32.of([tokens]))
    encoder.launch(EncodePlan(step=0, inputs=one)).wait()


def decoder_runner(
    config: WorkerConfig,
    loaded: LoadedModel,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
    budget: int,
) -> EncodeRunner:
    """Return a runner that encodes with a decoder, in steps of up to `budget` tokens, or of one
    input."""
    model, spec = loaded.model, loaded.spec
    assert loaded.vectors is not None
    assert isinstance(model, DecoderModel)
    vectors = DecoderVectors(
        model,
        loaded.vectors,
        attention,
        norm=model.normed,
        num_layers=spec.num_kv_layers,
        heads=spec.layer_heads[0],
        block_tokens=config.block_tokens,
        max_tokens=max(budget, longest_input(config, loaded.card)),
        dtype=dtype,
        device=device,
    )
    return EncodeRunner(vectors)


def pooling_runner(
    config: WorkerConfig,
    loaded: LoadedModel,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
    budget: int,
) -> EncodeRunner | None:
    """Return a runner that encodes with a model that also generates; None if the model only
    generates. The arguments are those of `decoder_runner`. Raises UnusableModel if several ranks
    compute the model."""
    if loaded.card.encoding is None:
        return None
    if config.world_size > 1:
        raise UnusableModel(
            "vectors are not supported with --tensor-parallel", remedy="serve without --pooling"
        )
    return decoder_runner(config, loaded, attention, dtype, device, budget)


def with_input_limit(ready: WorkerReady) -> WorkerReady:
    """Return the message with inputs that are no longer than `max_len`, if the model encodes."""
    if ready.model.encoding is None:
        return ready
    limit = min(ready.model.encoding.max_tokens, ready.max_len)
    encoding = msgspec.structs.replace(ready.model.encoding, max_tokens=limit)
    model = msgspec.structs.replace(ready.model, encoding=encoding)
    return msgspec.structs.replace(ready, model=model)


def tokenizer_read(header: AnyHeader) -> TokenizerRead:
    return TokenizerRead(
        tokenizer=header.text.tokenizer,
        vocab_size=header.spec.vocab_size,
        eos_token_ids=header.text.eos_token_ids,
    )
