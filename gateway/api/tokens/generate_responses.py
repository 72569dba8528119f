"""POST /inference/v1/generate: what it tells, whole and in chunks. Names and shapes are vLLM's.

In a whole answer every field is there, null where there is nothing to tell; fields of the peer that
this server never has anything for are null always. `system_fingerprint` and `weights_digest` are
ours. `output_mode` tells the two shapes apart; without it, it is "tokens". Anything that the peer
may leave out has a default, so its answers can be read with these structs, too.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.responses import (
    ChatLogprobs,
    CompletionTokensDetails,
    PromptTokensDetails,
    TokenChance,
)
from gateway.observe.timings import Timings

FinishReason = Literal["stop", "length", "abort"]


class GenerateUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt counts once, however many answers it has; in a chunk: of its own choice."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class TopToken(msgspec.Struct, frozen=True, kw_only=True):
    """rank              1 for the most likely token; null where it is not known
    sampling_logprob  beside `logprob`, under the distribution the token was drawn from, where both
                      were asked for
    """

    token_id: int
    logprob: float
    rank: int | None = None
    sampling_logprob: float | UnsetType = UNSET


class ChosenToken(TopToken, frozen=True, kw_only=True):
    """top_logprobs  the chosen token, then the most likely others, then those asked for"""

    top_logprobs: list[TopToken] = []


class TokensLogprobs(msgspec.Struct, frozen=True):
    content: list[ChosenToken]


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice in mode "tokens", of a chunk or a whole answer.

    stop_reason  the stop string, or the stop token of the request, that ended it
    """

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int]
    routed_experts: Any = None
    sampling_mask: Any = None
    weight_versions: Any = None
    logprobs: TokensLogprobs | None = None


class GeneratedTextChoice(GeneratedChoice, frozen=True, kw_only=True):
    """A choice in mode "text"; its logprobs are a chat's."""

    text: str
    logprobs: ChatLogprobs | None = None  # type: ignore[assignment]  # narrower, and frozen


class GenerateResponse(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="output_mode", tag="tokens"
):
    """A whole answer in mode "tokens".

    kv_transfer_params  with which another server goes on; null: no K/V is kept for anybody
    """

    request_id: str
    model: str | None = None
    created: int | None = None
    system_fingerprint: str | UnsetType = UNSET
    weights_digest: str | UnsetType = UNSET
    usage: GenerateUsage | None = None
    prompt_logprobs: list[dict[str, TokenChance] | None] | None = None
    prompt_token_id_logprobs: Any = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: Any = None
    metrics: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    ignored_params: list[str] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    choices: list[GeneratedChoice]


class GenerateTextResponse(GenerateResponse, frozen=True, kw_only=True, tag="text"):
    """A whole answer in mode "text"."""

    choices: list[GeneratedTextChoice]  # type: ignore[assignment]  # narrower, and frozen


class GenerateChunk(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="output_mode", tag="tokens"
):
    """One choice's news in mode "tokens", or, without choices, the usage of all.

    prompt_token_ids    in the first chunk, where asked for
    weights_digest, kv_transfer_params   in a choice's last chunk, and with the usage of all
    """

    request_id: str
    system_fingerprint: str | UnsetType = UNSET
    weights_digest: str | UnsetType = UNSET
    usage: GenerateUsage | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET
    ignored_params: list[str] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    choices: list[GeneratedChoice]


class GenerateTextChunk(GenerateChunk, frozen=True, kw_only=True, tag="text"):
    """The same in mode "text"."""

    choices: list[GeneratedTextChoice]  # type: ignore[assignment]  # narrower, and frozen


class AbortedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Each id of the request, in its order, once, in one of the two."""

    aborted: list[str]
    unknown: list[str]
