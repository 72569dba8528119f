"""Response bodies of llama.cpp's routes.

/completion answers as /infill does, with the settings, the prompt, and probabilities if they are
requested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.infill.responses import InfillAnswer, InfillChunk, InfillEnvelope
from gateway.formats.events import OutputDelta
from gateway.served_model import ServedModel, version
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.sampling import SamplingParams

Probability = dict[str, Any]
"""A token with `id`, `token`, `bytes`, and `logprob` or `prob`."""


class LlamaCompletionChunk(InfillChunk, frozen=True, kw_only=True):
    """A delta of the text, and the probabilities of its tokens if they are requested."""

    completion_probabilities: list[Probability] | UnsetType = UNSET


class LlamaCompletionAnswer(InfillAnswer, frozen=True, kw_only=True):
    """The whole answer, or the last event of a stream.

    generation_settings       the parameters that the answer was sampled with
    prompt                    the text of the prompt
    completion_probabilities  the probabilities of each token, if they are requested; not in a
                              stream, whose other events have them
    """

    id_slot: Literal[-1] = -1
    generation_settings: dict[str, Any]
    prompt: str
    completion_probabilities: list[Probability] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ProbabilityReport:
    """How the probabilities of tokens are reported. `is_drawn`: those of the distribution that the
    token was drawn from, and not their logarithms."""

    tokenizer: Tokenizer
    is_drawn: bool

    def of(self, entries: list[TokenLogprobs]) -> list[Probability]:
        """Return the probabilities of sampled tokens."""
        top = "top_probs" if self.is_drawn else "top_logprobs"
        return [
            {
                **self._one(entry.token_id, entry.logprob),
                top: [*map(self._one, entry.top_ids, entry.top_logprobs)],
            }
            for entry in entries
        ]

    def _one(self, token_id: int, logprob: float) -> Probability:
        text, data = self.tokenizer.spelling(token_id)
        value = {"prob": math.exp(logprob)} if self.is_drawn else {"logprob": logprob}
        return {"id": token_id, "token": text, "bytes": data, **value}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCompletionEnvelope(InfillEnvelope):
    """The members of an answer of /completion that do not depend on its text."""

    prompt: str
    settings: Mapping[str, Any]
    report: ProbabilityReport | None = None
    #: The probabilities of the tokens of a whole answer.
    probabilities: list[Probability] | UnsetType = UNSET

    def whole(self, answer: OutputDelta) -> LlamaCompletionEnvelope:
        return replace(self, probabilities=self._probabilities(answer))

    def chunk(self, delta: OutputDelta, members: Mapping[str, Any]) -> LlamaCompletionChunk:
        return LlamaCompletionChunk(**members, completion_probabilities=self._probabilities(delta))

    def _struct(self, members: Mapping[str, Any]) -> LlamaCompletionAnswer:
        return LlamaCompletionAnswer(
            **members,
            prompt=self.prompt,
            generation_settings=dict(self.settings),
            completion_probabilities=self.probabilities,
        )

    def _probabilities(self, delta: OutputDelta) -> list[Probability] | UnsetType:
        return UNSET if self.report is None else self.report.of(delta.logprobs)


def settings_of(params: SamplingParams, max_len: int, stop: list[str]) -> dict[str, Any]:
    """Return sampling parameters by llama.cpp's names.

    max_len   most tokens of prompt and answer together
    """
    seed = -1 if params.seed is None else params.seed
    return {
        "n_ctx": max_len,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": seed,
        **{name: getattr(params, name) for name in _SETTINGS},
        "top_k": max(params.top_k, 0),
        "repeat_penalty": params.repetition_penalty,
        "n_probs": params.logprobs or 0,
        "stop": stop,
    }


_SETTINGS = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "typical_p"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "presence_penalty", "frequency_penalty"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("ignore_eos", "samplers", "min_tokens"),
)
"""Parameters that llama.cpp has under the same name."""


class AppliedTemplate(msgspec.Struct, frozen=True):
    """A rendered conversation."""

    prompt: str


class DefaultSettings(msgspec.Struct, frozen=True):
    """The settings of a request that sets none."""

    n_ctx: int
    params: dict[str, Any]


class Properties(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the server and its model.

    total_slots   requests that are computed at the same time
    """

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class SlotState(msgspec.Struct, frozen=True):
    """A place for a request that is computed."""

    id: int
    n_ctx: int
    is_processing: bool


def properties_of(model: ServedModel, defaults: SamplingParams) -> Properties:
    """Return the properties of a served model."""
    card, max_len = model.card, model.limits.max_len
    return Properties(
        default_generation_settings=DefaultSettings(max_len, settings_of(defaults, max_len, [])),
        total_slots=model.limits.max_slots,
        model_alias=model.names[0],
        model_path=model.names[0],
        modalities={"vision": not model.renderer.image_refusal, "audio": False},
        chat_template=card.chat_template or "",
        bos_token=_piece(model.tokenizer, [card.bos_token_id]),
        eos_token=_piece(model.tokenizer, card.eos_token_ids),
        build_info=f"tidegate {version()}",
    )


def slot_states(max_len: int, total: int, busy: int) -> Iterator[SlotState]:
    """Yield the states of all slots. Clients cannot choose a slot, so the first ones are busy."""
    return (SlotState(slot, max_len, slot < busy) for slot in range(total))


def _piece(tokenizer: Tokenizer, ids: Any) -> str:
    """Return the string of the first of these tokens in the vocabulary; "" if there is none."""
    return next((tokenizer.token_piece(each) for each in ids if each is not None), "")
