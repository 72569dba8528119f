"""Sampling parameters of one generation, and their bounds.

HTTP schemas use the annotated types of this module, so the engine accepts every number that a route
accepts. Parameters that concern text or choices (stop strings, n) are declared in the gateway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
from msgspec import Meta

from protocol.wire.arrays import Int32
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_errors import field_error

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100
MAX_BAD_WORDS = 128
"""Most bad words in a request, as its user writes them."""
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
"""Most token sequences for these words. A word has up to two: at the start of a text, and after a
space.
"""
MAX_BAD_TOKENS = 1024
"""Most tokens in all these sequences together."""
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BREAKERS = 128
"""Most elements of `dry_breakers`."""
MAX_BREAKER_HEADS = 1 << 14
"""Most heads in all breakers together. About 4,000 of the 150,000 tokens of Qwen3 contain one of
the four characters that are breakers by default."""
MAX_BREAKER_TAIL = 31
"""Most tokens of a breaker after its head."""
MAX_TAIL_TOKENS = 1024
"""Most tokens in the tails of all breakers together."""
MAX_LIST_ITEMS = (
    MAX_ALLOWED_TOKEN_IDS
    + MAX_BAD_SEQUENCES
    + MAX_BAD_TOKENS
    + MAX_BREAKER_HEADS
    + MAX_TAIL_TOKENS
    + 2 * MAX_BREAKERS
    + 2 * MAX_LOGIT_BIAS
    + MAX_LOGPROB_TOKEN_IDS
    + MAX_STOP_TOKEN_IDS
)
"""Most numbers in all lists of a request together."""
MAX_TOKENS = 1 << 24
MAX_XTC_THRESHOLD = 0.5
"""Largest threshold of XTC with an effect: two tokens cannot both have a larger probability."""

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 24)]
MinP = Annotated[float, Meta(ge=0, le=1)]
AdditivePenalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
"""The sampler multiplies or divides logits by this value. The lower bound prevents overflow."""
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
BiasValue = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
LogitBias = Annotated[dict[TokenId, BiasValue], Meta(max_length=MAX_LOGIT_BIAS)]
BadWord = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BAD_TOKENS)]
BadWords = Annotated[list[BadWord], Meta(max_length=MAX_BAD_SEQUENCES)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]
TypicalP = Annotated[float, Meta(gt=0, le=1)]
TopNSigma = Annotated[float, Meta(ge=-1, le=100)]
DynatempRange = Annotated[float, Meta(ge=0, le=2)]
DynatempExponent = Annotated[float, Meta(ge=0, le=10)]
XtcProbability = Annotated[float, Meta(ge=0, le=1)]
XtcThreshold = Annotated[float, Meta(ge=0, le=1)]
Mirostat = Annotated[int, Meta(ge=0, le=2)]
MirostatTau = Annotated[float, Meta(ge=0, le=100)]
MirostatEta = Annotated[float, Meta(ge=0, le=1)]
DryMultiplier = Annotated[float, Meta(ge=0, le=100)]
DryBase = Annotated[float, Meta(ge=1, le=100)]
DryAllowedLength = Annotated[int, Meta(ge=0, le=1024)]
DryPenaltyLastN = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
PenaltyName = Literal["penalties", "dry"]
FilterName = Literal["temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"]
Samplers = Annotated[list[PenaltyName | FilterName], Meta(max_length=16)]
"""The samplers of a request in the order in which they are applied, by llama.cpp's names."""
FILTERS: tuple[str, ...] = get_args(FilterName)
"""All filters, in the order in which they are applied if a request has no `samplers`."""
PENALTIES: tuple[str, ...] = get_args(PenaltyName)
"""The samplers that change logits by the tokens so far. They are applied before all filters."""
LogprobsOf = Literal["model", "sampling", "both"]
LogprobTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)]


class DryBreaker(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sequence breakers of DRY: each of the heads, followed by the tail, is one."""

    heads: Annotated[list[TokenId], Meta(max_length=MAX_BREAKER_HEADS)]
    tail: Annotated[list[TokenId], Meta(max_length=MAX_BREAKER_TAIL)] = []


DryBreakers = Annotated[list[DryBreaker], Meta(max_length=MAX_BREAKERS)]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The sampling parameters of one generation. An engine applies no other defaults. The
    constructor raises ValueError, naming the field, if a number is not finite, if values exclude
    each other, or if a list has too few or too many elements: an engine that reads such a list
    refuses the whole message."""

    #: Most tokens of the answer. None: until the context is full. 0: only compute the prompt, for
    #: its logprobs.
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    #: Fewest tokens of the answer: no stop token is sampled before this many tokens.
    min_tokens: MinTokens = 0
    #: 0: greedy, which always samples the most likely token.
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    #: 0 or -1: off.
    top_k: TopK = 0
    min_p: MinP = 0.0
    #: Keep the tokens whose surprise is nearest to the entropy, of this mass. 1: off.
    typical_p: TypicalP = 1.0
    #: Keep logits within this many standard deviations of the largest one. 0 or less: off.
    top_n_sigma: TopNSigma = 0.0
    #: The temperature varies by up to this amount with the entropy. 0: off.
    dynatemp_range: DynatempRange = 0.0
    dynatemp_exponent: DynatempExponent = 1.0
    #: Probability that, at a token, all tokens with a probability of at least `xtc_threshold` are
    #: excluded except the least likely of them. 0: off. A threshold above 0.5: off.
    xtc_probability: XtcProbability = 0.0
    xtc_threshold: XtcThreshold = 0.1
    #: The version of Mirostat, which limits the surprise of tokens so that its mean comes near
    #: `mirostat_tau` bits. It replaces all filters but the temperature. 0: off.
    mirostat: Mirostat = 0
    mirostat_tau: MirostatTau = 5.0
    #: How fast the limit follows the surprise of each token.
    mirostat_eta: MirostatEta = 0.1
    #: A token that would continue a repeated sequence of n tokens loses dry_multiplier *
    #: dry_base ** (n - dry_allowed_length), if n is at least dry_allowed_length. 0: off.
    dry_multiplier: DryMultiplier = 0.0
    dry_base: DryBase = 1.75
    dry_allowed_length: DryAllowedLength = 2
    #: Number of latest tokens, prompt included, in which DRY finds repetitions. -1: all.
    dry_penalty_last_n: DryPenaltyLastN = -1
    #: Sequences of tokens over which no repetition continues.
    dry_breakers: DryBreakers = []
    #: The samplers to apply, in this order; those that are not listed are off. The penalties and
    #: "dry" must be listed before the filters. None: all, in the order of FILTERS.
    samplers: Samplers | None = None
    frequency_penalty: AdditivePenalty = 0.0
    presence_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    #: None: the engine draws a random seed.
    seed: Seed | None = None
    #: Tokens that end the answer, in addition to the model's end tokens.
    stop_token_ids: StopTokenIds = []
    #: Whether the answer continues after the model's end tokens.
    ignore_eos: bool = False
    logit_bias: LogitBias = {}
    #: Report the logprobs of the sampled token and of this many most likely tokens. None: report
    #: no logprobs.
    logprobs: NumLogprobs | None = None
    #: The same as `logprobs`, for each prompt token after the first.
    prompt_logprobs: NumLogprobs | None = None
    #: Token sequences that the answer never contains.
    bad_words: BadWords = []
    #: The only tokens that may be sampled; end tokens are not exempt. None: all tokens.
    allowed_token_ids: AllowedTokenIds | None = None
    #: Tokens whose logprobs are reported with each sampled token, whichever token that is.
    logprob_token_ids: LogprobTokenIds = []
    #: The distribution that `logprobs` are computed from. "model": the model's. "sampling": the one
    #: that the token was drawn from, after the grammar and all parameters above. "both": report the
    #: model's logprobs, and in addition those of the same tokens in the other distribution.
    logprobs_of: LogprobsOf = "model"

    def __post_init__(self) -> None:
        for name in _FLOATS:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: must be a finite number")
        if not all(map(math.isfinite, self.logit_bias.values())):
            worst = next(t for t, bias in self.logit_bias.items() if not math.isfinite(bias))
            raise ValueError(f"logit_bias.{worst}: must be a finite number")
        for name, (least, most) in _LENGTHS.items():
            values = getattr(self, name)
            if values is not None and not least <= len(values) <= most:
                raise ValueError(
                    f"{name}: must have {least:,} to {most:,} elements; got {len(values):,}"
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"max_tokens: must be at least min_tokens ({self.min_tokens}); "
                f"got {self.max_tokens}"
            )
        if sum(map(len, self.bad_words)) > MAX_BAD_TOKENS:
            raise ValueError(f"bad_words: must have at most {MAX_BAD_TOKENS:,} tokens together")
        if not all(self.bad_words):
            raise ValueError("bad_words: each sequence must have at least one token")
        if self.dry_breakers:
            self._check_breakers()
        if self.samplers is not None:
            check_samplers(self.samplers)
        if self.logprobs_of != "model":
            self._check_logprobs_of()

    def _check_breakers(self) -> None:
        if sum(len(each.heads) for each in self.dry_breakers) > MAX_BREAKER_HEADS:
            raise ValueError(
                f"dry_breakers: must have at most {MAX_BREAKER_HEADS:,} heads together"
            )
        if any(len(each.tail) > MAX_BREAKER_TAIL for each in self.dry_breakers):
            raise ValueError(f"dry_breakers: must have at most {MAX_BREAKER_TAIL} tokens in a tail")
        if sum(len(each.tail) for each in self.dry_breakers) > MAX_TAIL_TOKENS:
            raise ValueError(
                f"dry_breakers: must have at most {MAX_TAIL_TOKENS:,} tokens in their tails"
            )

    def _check_logprobs_of(self) -> None:
        if self.logprobs is None and not self.logprob_token_ids:
            raise ValueError(f"logprobs_of: {self.logprobs_of} requires logprobs")
        if self.temperature == 0:
            raise ValueError(
                f"logprobs_of: {self.logprobs_of} requires a temperature above 0, because nothing "
                "is drawn at 0"
            )


_LENGTHS: dict[str, tuple[int, int]] = {
    field.name: (kind.min_length or 0, kind.max_length)
    for field in cast(
        "msgspec.inspect.StructType", msgspec.inspect.type_info(SamplingParams)
    ).fields
    for kind in getattr(field.type, "types", (field.type,))
    if isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.DictType)
    and kind.max_length is not None
}
"""List or object of SamplingParams -> its fewest and most elements, as its type declares them."""


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "dynatemp_range",
    "dynatemp_exponent",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
    "dry_multiplier",
    "dry_base",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


_OFF: dict[str, dict[str, float]] = {
    "penalties": {
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    },
    "dry": {"dry_multiplier": 0.0},
}
"""Sampler that is not a filter -> the values of its parameters that switch it off."""


def check_samplers(samplers: Sequence[str]) -> None:
    """Raise ValueError if a sampler is listed twice, or a filter before a penalty."""
    for place, name in enumerate(samplers):
        if name in samplers[:place]:
            raise ValueError(f"samplers: must list {name} only once")
        if name in PENALTIES and any(other not in PENALTIES for other in samplers[:place]):
            raise ValueError(
                f"samplers: must list {name} before all filters, because penalties are applied to "
                "the logits of all tokens"
            )


def listed_only(params: SamplingParams) -> SamplingParams:
    """Return `params` with the penalties switched off that their `samplers` do not list."""
    if params.samplers is None:
        return params
    off = [values for name, values in _OFF.items() if name not in params.samplers]
    changes = {name: value for values in off for name, value in values.items()}
    return msgspec.structs.replace(params, **changes) if changes else params


def filter_order(params: SamplingParams) -> list[str] | None:
    """Return the filters of a request in the order in which they are applied. None: the request is
    greedy, or only temperature, top_k, top_p and min_p are applied, in this order."""
    if params.temperature == 0:
        return None
    if params.mirostat:
        return ["temperature"]
    if params.samplers is not None:
        return [name for name in params.samplers if name not in PENALTIES]
    is_used = (
        params.typical_p < 1
        or params.top_n_sigma > 0
        or params.dynatemp_range > 0
        or (params.xtc_probability > 0 and params.xtc_threshold <= MAX_XTC_THRESHOLD)
    )
    return list(FILTERS) if is_used else None


def uses_mirostat(params: SamplingParams) -> bool:
    """Return whether Mirostat limits the request's tokens. At temperature 0 it does not."""
    return params.mirostat > 0 and params.temperature > 0


def first_mu(params: SamplingParams) -> float:
    """Return the largest surprise, in bits, of the first token of an answer; 0 without Mirostat."""
    return 2 * params.mirostat_tau if uses_mirostat(params) else 0.0


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest if a token id in `params` is not in the vocabulary."""
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids),
        *(
            (f"dry_breakers[{i}].{part}", ids)
            for i, each in enumerate(params.dry_breakers)
            for part, ids in (("heads", each.heads), ("tail", each.tail))
        ),
        *((f"bad_words[{i}]", word) for i, word in enumerate(params.bad_words)),
    ):
        check_token_ids(ids, vocab_size, field)
    worst = max(params.logit_bias, default=0)
    if worst >= vocab_size:
        raise _unknown_token(worst, vocab_size, f"logit_bias.{worst}")


def check_token_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raise InvalidRequest if an element of `ids`, the field `field`, is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise _unknown_token(ids[index], vocab_size, f"{field}[{index}]")


def check_token_array(ids: Int32, vocab_size: int, field: str) -> None:
    """Check as `check_token_ids` does, in a tenth of the time."""
    index = ids.find_outside(vocab_size)
    if index is not None:
        token_id = ids.to_array()[index]
        raise _unknown_token(token_id, vocab_size, f"{field}[{index}]")


def _unknown_token(token_id: int, vocab_size: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: token id {token_id} is not in the vocabulary of {vocab_size} tokens", param=param
    )


def params_from(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """Return `params`, or parameters made from `options`. Raises InvalidRequest for bad options,
    TypeError if both are given."""
    if params is None:
        try:
            return msgspec.convert(options, SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(field_error(error, options, SamplingParams))) from None
    if options:
        raise TypeError("give either params or its fields, not both")
    return params
