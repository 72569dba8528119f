"""The body of /infill, and its translation into a completion.

The fields are those of llama.cpp's server (tools/server/README.md: `/infill` and `/completion`), as
far as they have a meaning here. Other fields have no effect and are listed in the response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import (
    BreakerTexts,
    CacheSalt,
    CompletionBody,
    OpenEndedCompletion,
    Priority,
    Stop,
    Timeout,
)
from gateway.http.text_fields import Name, PromptText
from gateway.prompt.infill import InfillFile
from protocol.engine.sampling import (
    MAX_TOKENS,
    AdditivePenalty,
    DryAllowedLength,
    DryBase,
    DryMultiplier,
    DryPenaltyLastN,
    DynatempExponent,
    DynatempRange,
    MinP,
    Mirostat,
    MirostatEta,
    MirostatTau,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    XtcProbability,
    XtcThreshold,
)

MAX_FILES = 1024
MAX_RESPONSE_FIELDS = 64
_COPIED = (
    *("model", "stream", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "grammar", "json_schema", "strict_params"),
    *("typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "xtc_probability"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
    *("xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    "dry_sequence_breakers",
    *("cache_salt", "priority", "timeout_s", "queue_timeout_s"),
)
"""Fields that a completion has too, with the same meaning."""
_PATHS = {
    r"^prompt$": "input_prefix",
    r"^suffix$": "input_suffix",
    r"^max_tokens$": "n_predict",
    r"^repetition_penalty$": "repeat_penalty",
}
"""Pattern of a field's path in the completion -> path in the client's request."""


class ExtraFile(msgspec.Struct, frozen=True):
    """Another file of the project, as context.

    text      content of the file
    filename  name of the file, which the model sees
    """

    text: PromptText
    filename: Name = "tmp"


class InfillBody(msgspec.Struct, frozen=True, kw_only=True):
    """A text with a gap to fill, as in llama.cpp's API.

    input_prefix     the text before the gap. Example: "def mean(values):\\n"
    input_suffix     the text after the gap. Example: "    return result"
    input_extra      other files, the most important one last; the first ones are left out if the
                     context has no room for them
    prompt           more text before the gap, directly after `input_prefix`
    n_predict        most tokens of the answer. -1: until the context is full. 0: only compute the
                     prompt, so that the next request finds it in the cache. Default: -1
    repeat_penalty   another name of `repetition_penalty`. Default: the model's, or 1
    return_tokens    whether to include the token ids of the answer. Default: false
    response_fields  return only these members. Example: ["content", "timings/prompt_n"]
    cache_prompt     without effect: every prompt is cached
    """

    described_like: ClassVar = CompletionBody

    input_prefix: PromptText
    input_suffix: PromptText
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: PromptText | None = None
    model: Name | None = None
    stream: bool | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    typical_p: TypicalP | None = None
    top_n_sigma: TopNSigma | None = None
    dynatemp_range: DynatempRange | None = None
    dynatemp_exponent: DynatempExponent | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: MirostatTau | None = None
    mirostat_eta: MirostatEta | None = None
    xtc_probability: XtcProbability | None = None
    xtc_threshold: XtcThreshold | None = None
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: DryAllowedLength | None = None
    dry_penalty_last_n: DryPenaltyLastN | None = None
    dry_sequence_breakers: BreakerTexts | None = None
    seed: Seed | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    grammar: Any = None
    json_schema: Any = None
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

    @property
    def files(self) -> Sequence[InfillFile]:
        return [
            InfillFile(file.filename, file.text, f"input_extra[{place}].text")
            for place, file in enumerate(self.input_extra or ())
        ]

    def completion(self) -> OpenEndedCompletion:
        """Return the same request as a completion. Its timings are always requested."""
        return OpenEndedCompletion(
            prompt=self.input_prefix + (self.prompt or ""),
            suffix=self.input_suffix,
            max_tokens=None if self.n_predict == -1 else self.n_predict,
            repetition_penalty=self.repeat_penalty,
            timings=True,
            **{name: getattr(self, name) for name in _COPIED},
        )


def request_path(name: str) -> str:
    """Return the path in the client's request for a field path of the completion."""
    for pattern, own in _PATHS.items():
        name = re.sub(pattern, own, name)
    return name
