"""Request bodies of the token-level routes. Names and shapes are vLLM's.

- A null field equals an absent field.
- Unknown fields have no effect. The response lists them, or the request is refused if it sets
  `strict_params`.
- Unsupported fields that would change the answer are declared, so that they can be refused
  (`REFUSED`, `REFUSED_SAMPLING`).
- The model's sampling defaults are not applied to /inference/v1/generate: absent parameters are
  neutral, so that trainers sample from the distribution they request.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import (
    CacheSalt,
    ChatBody,
    Count,
    Object,
    Priority,
    SamplingFields,
    Stop,
    StreamOptions,
    Timeout,
)
from gateway.http.text_fields import Name, PromptText
from protocol.engine.grammar import Grammar
from protocol.engine.sampling import (
    MAX_TOKENS,
    LogprobsOf,
    LogprobTokenIds,
    NumLogprobs,
    TokenId,
)

MAX_REQUEST_IDS = 4096
MAX_DETOKENIZED = 1 << 20

RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")]
OutputMode = Literal["tokens", "text"]


class GenerateSampling(SamplingFields, frozen=True, kw_only=True):
    """The member `sampling_params` of a generate request.

    n                   number of choices; choice i is sampled with `seed` + i
    max_tokens          absent: up to the context length; 0: only compute the prompt
    seed                -1 means no seed
    logprobs            include logprobs of each sampled token and of this many top tokens
    logprobs_of         the distribution of the logprobs: the model's, the one sampled from, or both
    prompt_logprobs     include logprobs of the prompt tokens, from the model's distribution
    detokenize          false: produce no text; not with stop strings or output_mode "text"
    structured_outputs  constraint on the answer, as in a chat request
    thinking_token_budget   maximum number of reasoning tokens; -1: no limit
    skip_reading_prefix_cache   compute the whole prompt, even if it is cached

    Without effect: spaces_between_special_tokens, output_kind.
    """

    n: Count | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop: Stop | None = None
    detokenize: bool | None = None
    logprobs: NumLogprobs | None = None
    logprobs_of: LogprobsOf | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    structured_outputs: Any = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    skip_reading_prefix_cache: bool | None = None
    spaces_between_special_tokens: Any = None
    output_kind: Any = None
    flat_logprobs: Any = None
    stream_interval: Any = None
    watermarking: Any = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = None
    trace_decode_token_ids: Any = None
    extra_args: Any = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ReasoningParserKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the prompt was rendered, which the parser of reasoning needs.

    chat_template_kwargs  the arguments of the chat template
    """

    chat_template_kwargs: Object | None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /inference/v1/generate.

    request_id       part of the response's id; the header X-Request-Id takes precedence
    token_ids        the prompt
    token_offsets    without effect; renderers send it
    reasoning_ended  true: no reasoning precedes a structured answer; false: reasoning may precede;
                     null: the end of the prompt decides
    reads_calls      if reasoning_parser_kwargs is set, whether to parse tool calls; stop strings do
                     not apply inside calls; null: true
    return_token_ids   include the prompt's token ids
    output_mode      "text": include the text of the answer
    cache_salt       requests share cached prompts only if their salts are equal
    priority         lower values are scheduled first
    timeout_s, queue_timeout_s   limits in seconds on the total time and the time in the queue; see
                     docs/operate/load.md
    grammar          a complete grammar, instead of structured_outputs
    kv_transfer_params   for routers: do_remote_decode, or do_remote_prefill with a handle; see
                     docs/use/api-tokens.md
    strict_params    refuse fields that have no effect
    timings          include how long each stage took
    """

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: GenerateSampling
    request_id: RequestId | None = None
    token_offsets: Any = None
    model: Name | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    reads_calls: bool | None = None
    return_token_ids: bool | None = None
    output_mode: OutputMode | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    grammar: Grammar | None = None
    kv_transfer_params: Object | None = None
    strict_params: bool | None = None
    timings: bool | None = None
    ec_transfer_params: Any = None
    features: Any = None
    content_parts: Any = None


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /inference/v1/abort_requests.

    request_ids  response ids, with or without their prefix ("chatcmpl-", ...)
    """

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_REQUEST_IDS)]


REFUSED = ("features", "content_parts", "ec_transfer_params")
"""Unsupported fields of the body."""
REFUSED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "watermarking": (None, False),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None, 0),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None,),
    "extra_args": (None, {}),
    "stream_interval": (None, 1),
    "flat_logprobs": (None, False),
}
"""Unsupported field of `sampling_params` -> the values that are accepted."""


# ---- tokenize, detokenize


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize for a text.

    return_token_strs  include each token as the vocabulary spells it
    """

    prompt: PromptText
    model: Name | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeContentBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize in llama.cpp's form.

    add_special    add the special tokens that begin a prompt; by default there are none
    parse_special  accepted without effect: special tokens in a text are always recognised
    with_pieces    include the text of each token
    """

    content: PromptText
    model: Name | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenizeChatBody(ChatBody, frozen=True, kw_only=True):
    """The body of POST /tokenize for a conversation: a chat request. Fields about the answer have
    no effect."""

    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)]
    model: Name | None = None
