"""Plans the memory of a model that only encodes, by arithmetic alone, without torch.

Such a model has no K/V cache. Its step has as many tokens as the token budget, or as the longest
input if that is longer. By default the longest input is the longest one that fits.
"""

from __future__ import annotations

import math

from protocol.config.base import DeviceDefault
from protocol.config.worker import WorkerConfig
from protocol.engine.encoding import MAX_STEP_INPUTS
from protocol.tools.start_facts import ModelPlan
from worker.encoders.header import EncoderHeader
from worker.encoders.spec import MAX_GROUP_TOKENS, QUERY_TILE
from worker.errors import NotEnoughMemory, UnusableModel
from worker.kv.budget import in_gib
from worker.loading.header import ModelHeader
from worker.startup.memory_plan import (
    DTYPE_BYTES,
    PROCESS_BYTES,
    AnyPlanned,
    weights_bytes,
)

TOKEN_BUDGET = DeviceDefault(cpu=1024, gpu=16384)
"""Default of `token_budget` for models that only encode. No stream waits for their steps."""
COPIES = 6
"""Hidden states of a step that exist at the same time, and copies of queries, keys and values."""


def token_budget(config: WorkerConfig, *, is_gpu: bool) -> int:
    return TOKEN_BUDGET.choose(config.token_budget, is_gpu=is_gpu)


def only_encodes(header: object) -> bool:
    """Return whether the model with this header only encodes."""
    if isinstance(header, ModelHeader):
        return not header.generates
    return isinstance(header, EncoderHeader)


def extra_bytes(config: WorkerConfig, header: object, dtype: str, *, is_gpu: bool) -> int:
    """Return the memory that a model which also generates needs to encode: its small K/V cache, and
    a step of the longest input. 0 if it does not encode."""
    if not isinstance(header, ModelHeader) or header.encoding is None or not header.generates:
        return 0
    longest = max_input_tokens(config, header)
    work = work_bytes(config, header, longest, is_gpu=is_gpu) - PROCESS_BYTES
    return work + scratch_bytes(config, header, longest, dtype, is_gpu=is_gpu)


def scratch_bytes(
    config: WorkerConfig, header: ModelHeader, longest: int, dtype: str, *, is_gpu: bool
) -> int:
    """Return the size in bytes of the K/V cache with which a decoder encodes (decoder.py)."""
    tokens = max(token_budget(config, is_gpu=is_gpu), longest)
    blocks = -(-tokens // config.block_tokens) + MAX_STEP_INPUTS + 1
    heads = header.spec.layer_heads[0]
    return heads.num_stored * heads.dim * config.block_tokens * blocks * DTYPE_BYTES[dtype]


def dtype_of(config: WorkerConfig, header: object, usual: str, *, is_gpu: bool) -> str:
    """Return the name of the dtype of a model's weights. An encoder on a CPU computes in float32 by
    default: its vectors are compared with those of other programs, which do so too.

    usual   the dtype of other models
    """
    is_default = config.dtype == "auto" and isinstance(header, EncoderHeader) and not is_gpu
    return "float32" if is_default else usual


def max_input_tokens(config: WorkerConfig, header: EncoderHeader | ModelHeader) -> int:
    """Return the most tokens of an input. Raises UnusableModel if the configured limit exceeds the
    model's."""
    context = header.spec.context_tokens
    if config.max_len > context:
        raise UnusableModel(
            f"max_len is {config.max_len:,}; the model's context is {context:,} tokens",
            remedy=f"--max-len {context}, or less",
        )
    encoding = header.encoding
    limit = context if encoding is None else encoding.max_tokens
    return min(config.max_len or limit, limit)


def plan_encoder(
    config: WorkerConfig,
    header: EncoderHeader | ModelHeader,
    planned: AnyPlanned | None,
    *,
    device: str,
    dtype: str,
    free_bytes: int,
) -> ModelPlan:
    """Return the plan of a model that only encodes.

    planned   what the plan of a decoder needs; None for an encoder

    Raises NotEnoughMemory, with the numbers, and UnusableModel if an option is not possible.
    """
    check_options(config)
    weights = encoder_bytes(header, dtype) if planned is None else weights_bytes(planned, dtype)
    longest = max_input_tokens(config, header)
    is_gpu = device != "cpu"
    work = work_bytes(config, header, longest, is_gpu=is_gpu)
    if isinstance(header, ModelHeader):
        work += scratch_bytes(config, header, longest, dtype, is_gpu=is_gpu)
    if weights + work > free_bytes:
        raise NotEnoughMemory(
            f"{header.name} needs {in_gib(weights)} for weights ({dtype}) and {in_gib(work)} for "
            f"steps of up to {longest:,} tokens; {in_gib(free_bytes)} are free",
            remedy=f"--max-len {max(longest // 2, 1)}, or less, or use a smaller model",
        )
    return ModelPlan(
        name=header.name,
        architecture=header.spec.architecture,
        device=device,
        dtype=dtype,
        context_tokens=header.spec.context_tokens,
        max_len=longest,
        weights_bytes=weights,
        kv_bytes=0,
        longest_kv_bytes=0,
        work_bytes=work,
        free_bytes=free_bytes,
    )


def check_options(config: WorkerConfig) -> None:
    """Raise UnusableModel if an option makes no sense for a model that only encodes."""
    for name, is_set in (
        ("--draft-model", bool(config.draft_model)),
        ("--speculation mtp", config.draft_head),
        ("--tensor-parallel", config.world_size > 1),
        ("--kv-host-gib", config.kv_host_gib > 0),
        ("--kv-disk", bool(config.kv_disk)),
    ):
        if is_set:
            raise UnusableModel(
                f"{name} is not possible with a model that only encodes",
                remedy=f"serve without {name}",
            )


def encoder_bytes(header: EncoderHeader | ModelHeader, dtype: str) -> int:
    """Return the size of an encoder's weights after loading, in bytes."""
    dense = 0
    if header.vectors is not None:
        sizes = (each.outputs * (each.inputs + each.has_bias) for each in header.vectors.dense)
        dense = sum(sizes) * DTYPE_BYTES["float32"]
    return header.tensors.num_parameters * DTYPE_BYTES[dtype] + dense


def work_bytes(
    config: WorkerConfig, header: EncoderHeader | ModelHeader, longest: int, *, is_gpu: bool
) -> int:
    """Return the bytes of working memory: for the processes and a step's tensors, in float32."""
    tokens = max(token_budget(config, is_gpu=is_gpu), longest)
    spec = header.spec
    if isinstance(header, EncoderHeader):
        inner = max(layer.intermediate * (2 + layer.is_gated) for layer in header.spec.layers)
        width = max(layer.width for layer in header.spec.layers)
    else:
        inner = max(mlp.intermediate * mlp.top_k for mlp in header.spec.mlps) * 3
        width = max(
            each.work_width if each.latent else each.q_width + each.kv_width
            for each in header.spec.attentions
        )
    numbers = tokens * (COPIES * (spec.hidden + width) + inner)
    if isinstance(header, EncoderHeader) and header.spec.has_score_bias:
        numbers += _bias_numbers(header, tokens, longest)
    return PROCESS_BYTES + math.ceil(numbers * DTYPE_BYTES["float32"])


def _bias_numbers(header: EncoderHeader, tokens: int, longest: int) -> int:
    """Return how many numbers the biases of scores have at most at the same time: those of a tile
    of queries of each input of a group (ragged.py), counted twice because of padding and
    its mask."""
    num_heads = header.spec.layers[0].num_heads
    keys = max(min(tokens, MAX_GROUP_TOKENS), longest)
    return 2 * num_heads * min(longest, QUERY_TILE) * keys
