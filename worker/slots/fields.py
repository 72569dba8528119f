"""All fields of the slot table: the only place where per-request state is declared.

A new field must declare its `rest`, the policy for the part of a row that is not written. The table
derives everything else from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import torch

from protocol.engine.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    MAX_BREAKER_HEADS,
    MAX_BREAKERS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_TOKEN_IDS,
    MAX_TAIL_TOKENS,
    MAX_TOKENS,
    LogprobsOf,
    SamplingParams,
    filter_order,
    listed_only,
    uses_mirostat,
)
from protocol.worker.steps import MAX_HEAD_LAG, NULL_BLOCK, SlotInit
from worker.device.staging import integers
from worker.slots.features import features_of
from worker.slots.filter_order import packed_order
from worker.slots.rope_positions import rope_shift
from worker.slots.table import RestPolicy, SlotField, Value

MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 32
"""The request's own stop tokens plus the model's end tokens."""
NO_LOGPROBS = -1
"""Value of `num_logprobs` and `num_prompt_logprobs` if the request has not requested them. 0
requests the logprob of the token itself only."""
LOGPROBS_OF: tuple[str, ...] = get_args(LogprobsOf)
"""A slot stores the index of its request's `logprobs_of` in this tuple."""

SAMPLED = ("SlotTable.append_tokens", "sampling.triton.sampling.append_token")
EXTENDED = ("SlotTable.stage_items",)
COMPUTED = (
    *("Kernels.gated_delta", "Kernels.mamba1_conv", "Kernels.mamba1_scan"),
    *("Kernels.mamba2", "Kernels.rg_lru_conv", "Kernels.rg_lru_scan", "Kernels.short_conv"),
)
"""Values of `SlotField.written_by`: sampling writes the field, the plan does, or the model does."""
STATE = "state"
"""Name of the field with the recurrent state."""
MU = "mirostat_mu"
"""Name of the field with the state of Mirostat."""
ROPE_SHIFT = "rope_shift"
"""Name of the field with the shift of the rotary positions after the request's images."""
HIDDEN = "hidden"
"""Name of the field with the hidden states that the model's own head may still need."""


def slot_fields(
    max_len: int,
    max_blocks: int,
    state_items: int = 0,
    head_hidden: int = 0,
    has_rope_axes: bool = False,
) -> tuple[SlotField, ...]:
    """Return all fields, for requests of at most max_len tokens and max_blocks blocks.

    state_items     numbers of the model's recurrent state; 0: it has none
    head_hidden     numbers of a hidden state that the model's own head reads; 0: no head is used
    has_rope_axes   whether the rotary positions of an image have several axes
    """
    state = [_state(state_items)] if state_items else []
    hidden = [_hidden(head_hidden)] if head_hidden else []
    shift = [_scalar(ROPE_SHIFT, torch.int32, lambda init: rope_shift(init.images))]
    return (
        *_tokens_and_blocks(max_len, max_blocks),
        *_numbers(),
        *_lists(),
        *state,
        *hidden,
        *(shift if has_rope_axes else ()),
    )


def _hidden(width: int) -> SlotField:
    """Return the field of the hidden states of the request's last MAX_HEAD_LAG positions, before
    the final norm. That of position p is item p % MAX_HEAD_LAG. Zeros stand for positions that were
    not computed in this slot."""
    return SlotField(
        name=HIDDEN,
        dtype=torch.float32,
        shape=(MAX_HEAD_LAG * width,),
        rest=RestPolicy.FILL,
        init=lambda init: np.empty(0, np.float64),
        written_by=("HeadDrafter.keep",),
    )


def _state(items: int) -> SlotField:
    """Return the field of the recurrent state, after the request's last computed position
    (spec/recurrent.py). Only layers write it (slots/states.py)."""
    return SlotField(
        name=STATE,
        dtype=torch.float32,
        shape=(items,),
        rest=RestPolicy.RESTORED,
        written_by=COMPUTED,
    )


def _tokens_and_blocks(max_len: int, max_blocks: int) -> tuple[SlotField, ...]:
    """Return the fields of a request's tokens, block table and adapter. token_ids[slot, p] is the
    request's token p, from the prompt, the sampler or an earlier run of the request. adapter is a
    row of the table of adapters (lora/table.py) with its generation, or NO_ADAPTER."""
    return (
        SlotField(
            name="token_ids",
            dtype=torch.int32,
            shape=(max_len,),
            rest=RestPolicy.GUARDED,
            guard="len",
            init=lambda init: integers(init.tokens.data),
            written_by=SAMPLED + EXTENDED,
        ),
        SlotField(
            name="len",
            dtype=torch.int32,
            rest=RestPolicy.FILL,
            init=lambda init: len(init.tokens),
            written_by=SAMPLED + EXTENDED,
        ),
        SlotField(
            name="block_table",
            dtype=torch.int32,
            shape=(max_blocks,),
            rest=RestPolicy.FILL,
            fill=NULL_BLOCK,
            init=lambda init: integers(init.blocks.data),
            written_by=EXTENDED,
        ),
        _scalar("prompt_len", torch.int32, lambda init: init.prompt_tokens, host=True),
        _scalar("adapter", torch.int32, lambda init: init.adapter, host=True),
        _scalar("adapter_generation", torch.int32, lambda init: init.adapter_generation, host=True),
    )


def _numbers() -> tuple[SlotField, ...]:
    """Return the scalar fields of the sampling parameters. min_len is the number of tokens, prompt
    included, that a request must have before it may sample a stop token."""
    return (
        *_filters(),
        _parameter("frequency_penalty"),
        _parameter("presence_penalty"),
        _parameter("repetition_penalty"),
        *_mirostat(),
        *_dry(),
        _scalar("seed", torch.int64, lambda init: init.seed),
        _scalar("features", torch.int32, features_of, host=True),
        _scalar(
            "min_len",
            torch.int32,
            lambda init: init.prompt_tokens + init.params.min_tokens,
            host=True,
        ),
        _scalar("num_logprobs", torch.int32, lambda init: _num_logprobs(init.params), host=True),
        _scalar(
            "logprobs_of",
            torch.int32,
            lambda init: LOGPROBS_OF.index(init.params.logprobs_of),
            host=True,
        ),
        _scalar(
            "num_prompt_logprobs",
            torch.int32,
            lambda init: _or_no_logprobs(init.params.prompt_logprobs),
            host=True,
        ),
    )


def _filters() -> tuple[SlotField, ...]:
    """Return the scalar fields of the filters.

    If the request has an order of filters (sampling/filter_chain.py), the chain reads the fields
    `chain_*`. Then the fields that every draw reads (temperature, top_k, top_p, min_p) are neutral,
    because the chain has applied the parameters already.
    """
    return (
        _scalar("filter_order", torch.int64, lambda init: packed_order(init.params), host=True),
        *_drawn("temperature", torch.float32, 1.0),
        *_drawn("top_p", torch.float32, 1.0),
        *_drawn("min_p", torch.float32, 0.0),
        *_drawn("top_k", torch.int32, 0),
        _parameter("typical_p"),
        _parameter("top_n_sigma"),
        _parameter("dynatemp_range"),
        _parameter("dynatemp_exponent"),
        _parameter("xtc_probability"),
        _parameter("xtc_threshold"),
    )


def _drawn(name: str, dtype: torch.dtype, neutral: float) -> tuple[SlotField, SlotField]:
    """Return the field of a parameter that every draw reads, and the one that the chain reads.
    `neutral` is the first one's value if the request has an order of filters."""

    def of_draw(init: SlotInit) -> float:
        return _filter(name, init) if filter_order(init.params) is None else neutral

    return (
        _scalar(name, dtype, of_draw, host=True),
        _scalar(f"chain_{name}", dtype, lambda init: _filter(name, init), host=True),
    )


def _filter(name: str, init: SlotInit) -> float:
    """Return the value of a filter's parameter. An absent `top_k` may be -1 or 0; here it is 0."""
    value: float = getattr(init.params, name)
    return max(value, 0)


def _mirostat() -> tuple[SlotField, ...]:
    """Return the fields of Mirostat. mirostat_mu, the largest surprise of the next token, is the
    only one that changes: it depends on each token of the answer."""
    return (
        _scalar("mirostat", torch.int32, _mirostat_version, host=True),
        _parameter("mirostat_tau"),
        _parameter("mirostat_eta"),
        SlotField(
            name=MU,
            dtype=torch.float32,
            rest=RestPolicy.FILL,
            init=lambda init: init.mirostat_mu,
            written_by=("SurpriseLimits.advance",),
        ),
    )


def _mirostat_version(init: SlotInit) -> int:
    return init.params.mirostat if uses_mirostat(init.params) else 0


def _dry() -> tuple[SlotField, ...]:
    """Return the fields of DRY. The heads of each breaker are sorted."""
    return (
        _parameter("dry_multiplier"),
        _parameter("dry_base"),
        _scalar("dry_allowed", torch.int32, lambda init: init.params.dry_allowed_length),
        _scalar("dry_window", torch.int32, lambda init: _dry_window(init.params), host=True),
        *_sequences(
            "heads",
            "head_ends",
            (MAX_BREAKER_HEADS, MAX_BREAKERS),
            lambda params: [sorted(each.heads) for each in params.dry_breakers],
            count="num_breakers",
        ),
        *_sequences(
            "tails",
            "tail_ends",
            (MAX_TAIL_TOKENS, MAX_BREAKERS),
            lambda params: [each.tail for each in params.dry_breakers],
        ),
        _scalar(
            "longest_tail",
            torch.int32,
            lambda init: max((len(each.tail) for each in init.params.dry_breakers), default=0),
            host=True,
        ),
    )


def _dry_window(params: SamplingParams) -> int:
    """Return the number of latest tokens in which DRY finds repetitions. It is 0 if DRY is off."""
    if listed_only(params).dry_multiplier == 0:
        return 0
    return MAX_TOKENS if params.dry_penalty_last_n == -1 else params.dry_penalty_last_n


def _lists() -> tuple[SlotField, ...]:
    """Return the fields of the variable-length lists: a row of bounded length and a count for
    each."""
    return (
        _scalar("num_bias", torch.int32, lambda init: len(init.params.logit_bias), host=True),
        SlotField(
            name="bias_ids",
            dtype=torch.int32,
            shape=(MAX_LOGIT_BIAS,),
            rest=RestPolicy.GUARDED,
            guard="num_bias",
            init=lambda init: np.array(list(init.params.logit_bias), np.int64),
        ),
        SlotField(
            name="bias_values",
            dtype=torch.float32,
            shape=(MAX_LOGIT_BIAS,),
            rest=RestPolicy.GUARDED,
            guard="num_bias",
            init=lambda init: np.array(list(init.params.logit_bias.values()), np.float64),
        ),
        _scalar("num_stop_ids", torch.int32, lambda init: len(init.stop_ids), host=True),
        SlotField(
            name="stop_ids",
            dtype=torch.int32,
            shape=(MAX_STOP_IDS,),
            rest=RestPolicy.GUARDED,
            guard="num_stop_ids",
            init=lambda init: np.array(init.stop_ids, np.int64),
        ),
        *_ids("allowed", MAX_ALLOWED_TOKEN_IDS, lambda params: params.allowed_token_ids or []),
        *_ids("asked", MAX_LOGPROB_TOKEN_IDS, lambda params: params.logprob_token_ids),
        *_bad_words(),
    )


def _bad_words() -> tuple[SlotField, ...]:
    """Return the fields of the bad words."""
    return (
        *_sequences(
            "bad",
            "bad_ends",
            (MAX_BAD_TOKENS, MAX_BAD_SEQUENCES),
            lambda params: params.bad_words,
            count="num_bad_words",
        ),
        _scalar(
            "longest_bad_word",
            torch.int32,
            lambda init: max(map(len, init.params.bad_words), default=0),
            host=True,
        ),
    )


def _sequences(
    name: str,
    ends: str,
    limits: tuple[int, int],
    get_sequences: Callable[[SamplingParams], list[list[int]]],
    *,
    count: str | None = None,
) -> tuple[SlotField, ...]:
    """Return the fields of a list of token sequences: `{name}_ids` has all tokens, `ends` the end
    of each sequence, and `count` (`num_{ends}`) their number.

    limits   most tokens of all sequences together, and most sequences
    """
    count = count or f"num_{ends}"
    return (
        *_ids(name, limits[0], lambda params: [t for each in get_sequences(params) for t in each]),
        _scalar(count, torch.int32, lambda init: len(get_sequences(init.params)), host=True),
        SlotField(
            name=ends,
            dtype=torch.int32,
            shape=(limits[1],),
            rest=RestPolicy.GUARDED,
            guard=count,
            init=lambda init: np.cumsum(
                [len(each) for each in get_sequences(init.params)], dtype=np.int64
            ),
        ),
    )


def _ids(
    name: str, max_items: int, get_ids: Callable[[SamplingParams], list[int]]
) -> tuple[SlotField, ...]:
    """Return the fields of a list of token ids, `{name}_ids`, and of its count, `num_{name}`."""
    return (
        _scalar(f"num_{name}", torch.int32, lambda init: len(get_ids(init.params)), host=True),
        SlotField(
            name=f"{name}_ids",
            dtype=torch.int32,
            shape=(max_items,),
            rest=RestPolicy.GUARDED,
            guard=f"num_{name}",
            init=lambda init: np.array(get_ids(init.params), np.int64),
        ),
    )


def _scalar(
    name: str, dtype: torch.dtype, init: Callable[[SlotInit], Value], *, host: bool = False
) -> SlotField:
    return SlotField(name=name, dtype=dtype, rest=RestPolicy.FILL, init=init, host=host)


def _parameter(name: str) -> SlotField:
    """Return the field of a float parameter, which has the same name in SamplingParams. The value
    switches the parameter off if the request's `samplers` do not list it."""
    assert name in SamplingParams.__struct_fields__
    return _scalar(
        name, torch.float32, lambda init: getattr(listed_only(init.params), name), host=True
    )


def _num_logprobs(params: SamplingParams) -> int:
    """Return how many of the most likely tokens to report with each sampled token, or NO_LOGPROBS.
    The result is 0 if only `logprob_token_ids` is set, because it also requests the logprob of the
    sampled token."""
    if params.logprobs is None and params.logprob_token_ids:
        return 0
    return _or_no_logprobs(params.logprobs)


def _or_no_logprobs(count: int | None) -> int:
    return NO_LOGPROBS if count is None else count
