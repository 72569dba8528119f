"""The table of all per-slot buffers: the one list where a request's state is declared.

To add a field is to say what becomes of the rest of its row (`rest`); everything else follows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from protocol.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from protocol.steps import NULL_BLOCK, SlotInit
from worker.slots import Rest, SlotField, Value
from worker.staging import integers

MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 32
"""The request's own and the model's end tokens."""
NO_LOGPROBS = -1

SAMPLED = ("SlotTable.append_tokens",)
EXTENDED = ("SlotTable.stage_items",)


def slot_fields(max_len: int, max_blocks: int) -> tuple[SlotField, ...]:
    """max_len tokens and max_blocks blocks are the most that one request can have."""
    return (*_tokens_and_blocks(max_len, max_blocks), *_numbers(), *_lists())


def _tokens_and_blocks(max_len: int, max_blocks: int) -> tuple[SlotField, ...]:
    """Token p of a request is token_ids[slot, p], whoever wrote it: prompt, sampler, another life.

    generation is the device's copy of what SlotTable keeps on the host, for work that is in flight
    when its slot changes hands.
    """
    return (
        SlotField(
            name="token_ids",
            dtype=torch.int32,
            shape=(max_len,),
            rest=Rest.GUARDED,
            guard="len",
            init=lambda init: integers(init.tokens.data),
            written_by=SAMPLED,
        ),
        SlotField(
            name="len",
            dtype=torch.int32,
            rest=Rest.FILL,
            init=lambda init: len(init.tokens),
            written_by=SAMPLED,
        ),
        SlotField(
            name="block_table",
            dtype=torch.int32,
            shape=(max_blocks,),
            rest=Rest.FILL,
            fill=NULL_BLOCK,
            init=lambda init: integers(init.blocks.data),
            written_by=EXTENDED,
        ),
        _scalar("prompt_len", torch.int32, lambda init: init.prompt_tokens, host=True),
        _scalar("generation", torch.int64, lambda init: init.generation),
    )


def _numbers() -> tuple[SlotField, ...]:
    """min_len: tokens, prompt included, before which no stop token may be chosen."""
    return (
        _parameter("temperature"),
        _parameter("top_p"),
        _parameter("min_p"),
        _parameter("frequency_penalty"),
        _parameter("presence_penalty"),
        _parameter("repetition_penalty"),
        _scalar("top_k", torch.int32, lambda init: max(init.params.top_k, 0), host=True),
        _scalar("seed", torch.int64, lambda init: init.seed),
        _scalar(
            "min_len",
            torch.int32,
            lambda init: init.prompt_tokens + init.params.min_tokens,
            host=True,
        ),
        _scalar(
            "num_logprobs", torch.int32, lambda init: _or_none(init.params.logprobs), host=True
        ),
        _scalar(
            "num_prompt_logprobs",
            torch.int32,
            lambda init: _or_none(init.params.prompt_logprobs),
            host=True,
        ),
    )


def _lists() -> tuple[SlotField, ...]:
    """Lists of any length up to a bound, each behind its count."""
    return (
        _scalar("num_bias", torch.int32, lambda init: len(init.params.logit_bias), host=True),
        SlotField(
            name="bias_ids",
            dtype=torch.int32,
            shape=(MAX_LOGIT_BIAS,),
            rest=Rest.GUARDED,
            guard="num_bias",
            init=lambda init: np.array(list(init.params.logit_bias), np.int64),
        ),
        SlotField(
            name="bias_values",
            dtype=torch.float32,
            shape=(MAX_LOGIT_BIAS,),
            rest=Rest.GUARDED,
            guard="num_bias",
            init=lambda init: np.array(list(init.params.logit_bias.values()), np.float64),
        ),
        _scalar("num_stop_ids", torch.int32, lambda init: len(init.stop_ids), host=True),
        SlotField(
            name="stop_ids",
            dtype=torch.int32,
            shape=(MAX_STOP_IDS,),
            rest=Rest.GUARDED,
            guard="num_stop_ids",
            init=lambda init: np.array(init.stop_ids, np.int64),
        ),
    )


def _scalar(
    name: str, dtype: torch.dtype, init: Callable[[SlotInit], Value], *, host: bool = False
) -> SlotField:
    return SlotField(name=name, dtype=dtype, rest=Rest.FILL, init=init, host=host)


def _parameter(name: str) -> SlotField:
    """A float that SamplingParams has under the same name."""
    assert name in SamplingParams.__struct_fields__
    return _scalar(name, torch.float32, lambda init: getattr(init.params, name), host=True)


def _or_none(count: int | None) -> int:
    return NO_LOGPROBS if count is None else count
