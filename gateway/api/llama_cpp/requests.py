"""The body of /completion, and its translation into a completion.

The fields are those of llama.cpp's server (tools/server/README.md: `/completion`), as far as they
have a meaning here. Other fields have no effect and are listed in the response.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from gateway.api.infill.requests import MAX_RESPONSE_FIELDS
from gateway.api.openai.requests import (
    CacheSalt,
    CompletionBody,
    OpenEndedCompletion,
    Priority,
    SamplingFields,
    Stop,
    Timeout,
)
from gateway.http.text_fields import Name, PromptText
from protocol.engine.sampling import (
    FILTERS,
    MAX_TOKENS,
    PENALTIES,
    FilterName,
    NumLogprobs,
    PenaltyName,
    RepetitionPenalty,
    TokenId,
)
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

SamplerText = Annotated[str, Meta(max_length=64)]
AnySamplers = SamplerText | Annotated[list[SamplerText], Meta(max_length=32)]
USUAL_ORDER: list[PenaltyName | FilterName] = [
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
]
"""llama.cpp's order of samplers. The temperature comes last."""
_SPELLINGS = {
    **{name: name for name in (*PENALTIES, *FILTERS)},
    **dict.fromkeys(("typical_p", "typical-p", "typical", "typ-p", "typ"), "typ_p"),
    **{"top-k": "top_k", "top-p": "top_p", "nucleus": "top_p", "min-p": "min_p"},
    **{"temp": "temperature", "top-n-sigma": "top_n_sigma"},
}
"""A name of a sampler in llama.cpp -> its name here."""
_LETTERS = {
    **{"d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p"},
    **{"t": "temperature", "x": "xtc", "e": "penalties"},
}
"""A letter of llama.cpp's short form -> the sampler's name here."""
_WITHOUT_EFFECT = {"adaptive_p", "tfs_z"}
"""Samplers of other versions, which clients list although they do not use them."""
_COPIED = (
    *("model", "stream", "stop", "grammar", "json_schema", "strict_params"),
    *("cache_salt", "priority", "timeout_s", "queue_timeout_s"),
    *(set(SamplingFields.__struct_fields__) - {"samplers", "repetition_penalty"}),
)
"""Fields that a completion has too, with the same meaning."""
_PATHS = {
    r"^max_tokens$": "n_predict",
    r"^logprobs$": "n_probs",
    r"^logprobs_of$": "post_sampling_probs",
}
"""Pattern of a field's path in the completion -> path in the client's request."""


class LlamaCompletionBody(SamplingFields, frozen=True, kw_only=True):
    """A text to continue, as in llama.cpp's API.

    prompt           a text, or token ids. Example: "Once upon a time"
    n_predict        most tokens of the answer. -1: until the context is full. 0: only compute the
                     prompt, so that the next request finds it in the cache. Default: -1
    repeat_penalty   another name of `repetition_penalty`
    samplers         a list of names, or a text with a letter for each, as in llama.cpp. Default:
                     the order of llama.cpp. Example: ["penalties", "top_k", "top_p", "temperature"]
    n_probs          report the probabilities of each token and of this many most likely ones.
                     Default: 0, which reports none
    post_sampling_probs   whether they are those of the distribution that the token was drawn from,
                     instead of logarithms. Default: false
    return_tokens    whether to include the token ids of the answer. Default: false
    response_fields  return only these members. Example: ["content", "timings/prompt_n"]
    cache_prompt     without effect: every prompt is cached
    """

    described_like: ClassVar = CompletionBody

    prompt: PromptText | list[TokenId]
    model: Name | None = None
    stream: bool | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    samplers: AnySamplers | None = None  # type: ignore[assignment]  # here also other spellings
    stop: Stop | None = None
    grammar: Any = None
    json_schema: Any = None
    n_probs: NumLogprobs | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    response_fields: (
        Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=MAX_RESPONSE_FIELDS)]
        | None
    ) = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    strict_params: bool | None = None

    def completion(self) -> OpenEndedCompletion:
        """Return the same request as a completion. Its timings are always requested."""
        fields = {name: getattr(self, name) for name in _COPIED}
        return OpenEndedCompletion(
            prompt=self.prompt if isinstance(self.prompt, str) else [*self.prompt],
            max_tokens=None if self.n_predict == -1 else self.n_predict,
            repetition_penalty=self.repeat_penalty or self.repetition_penalty,
            samplers=samplers_of(self.samplers),
            logprobs=self.n_probs or None,
            timings=True,
            **fields,
        )


def samplers_of(given: str | list[str] | None) -> list[PenaltyName | FilterName]:
    """Return the order of samplers that a request gives in one of llama.cpp's forms. Raise
    InvalidRequest for a name that is not known here."""
    if given is None:
        return USUAL_ORDER
    known = _LETTERS if isinstance(given, str) else _SPELLINGS
    order: list[PenaltyName | FilterName] = []
    for place, name in enumerate(given):
        if name in _WITHOUT_EFFECT:
            continue
        if name not in known:
            raise InvalidRequest.wrong(f"samplers[{place}]", one_of(known), name)
        order.append(msgspec.convert(known[name], PenaltyName | FilterName))
    return order


def request_path(name: str) -> str:
    """Return the path in the client's request for a field path of the completion."""
    for pattern, own in _PATHS.items():
        name = re.sub(pattern, own, name)
    return name
