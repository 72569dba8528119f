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

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import (
    CacheSalt,
    ChatBody,
    Count,
    GenerationBody,
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
    """How the answer is sampled. The model's own defaults do not apply.

    temperature         how random the answer is: logits are divided by it. With 0 each token is the
                        most likely one. Default: 1
    top_p               sample only from the smallest set of most likely tokens whose probabilities
                        sum to this. Default: 1, which is off
    top_k               sample only from this many most likely tokens. 0 and -1 are off. Default: 0
    min_p               sample only from tokens at least this many times as likely as the most
                        likely one. Default: 0, which is off
    frequency_penalty   subtracted from the logit of a token for each time it is in the answer.
                        Default: 0
    presence_penalty    subtracted once from the logit of each token in the answer. Default: 0
    repetition_penalty  above 1, makes the tokens of prompt and answer less likely. Default: 1
    n                   number of choices; choice i is sampled with `seed` + i. Default: 1
    max_tokens          most tokens of the answer; 0: only compute the prompt. Default: until the
                        context is full
    logprobs            include logprobs of each sampled token and of this many top tokens
    logprobs_of         the distribution of the logprobs: the model's, the one sampled from, or
                        both. Default: the model's
    prompt_logprobs     include logprobs of the prompt tokens, from the model's distribution
    detokenize          whether to produce text, which stop strings and the output_mode "text" need.
                        Default: true
    structured_outputs  what the answer must match, as in a chat. Example: {"choice": ["yes", "no"]}
    skip_reading_prefix_cache   whether to compute the whole prompt, even if it is cached. Default:
                        false
    thinking_token_budget   most tokens of the reasoning. -1 means no limit. Default: no limit
    spaces_between_special_tokens, output_kind   without effect
    flat_logprobs, stream_interval, watermarking, prompt_logprob_token_ids, prompt_logprob_start
                        not supported; refused if set
    repetition_detection, routed_experts_prompt_start, trace_decode_token_ids, extra_args
                        not supported; refused if set
    """

    described_like: ClassVar = GenerationBody

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
    """A prompt of token ids to continue, and how.

    token_ids        the prompt. Example: [1, 15043, 29892]
    sampling_params  how the answer is sampled. Example: {"max_tokens": 32}
    request_id       part of the response's id; the header X-Request-Id takes precedence
    token_offsets    without effect; renderers send it
    reasoning_ended  whether a structured answer begins at once, instead of after reasoning.
                     Default: the end of the prompt decides
    reasoning_parser_kwargs   how the prompt was rendered; with it, reasoning is parsed
    reads_calls      with `reasoning_parser_kwargs`, whether to parse tool calls; stop strings do
                     not apply inside calls. Default: true
    return_token_ids  whether to include the token ids of the prompt. Default: false
    output_mode      "text" includes the text of the answer. Default: tokens
    grammar          a complete grammar, instead of `structured_outputs`
    ec_transfer_params, features, content_parts   not supported; refused if set
    """

    described_like: ClassVar = GenerationBody

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
    """Requests to end.

    request_ids  ids of responses, with or without their prefix. Example: ["chatcmpl-5f2a"]
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
    """A text to tokenize.

    prompt             the text. Example: "Hello, world!"
    add_special_tokens  whether to add the tokens that begin a prompt. Default: true
    return_token_strs  whether to include each token as the vocabulary spells it. Default: false
    """

    described_like: ClassVar = GenerationBody

    prompt: PromptText
    model: Name | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeContentBody(msgspec.Struct, frozen=True, kw_only=True):
    """A text to tokenize, in llama.cpp's form.

    content        the text. Example: "Hello, world!"
    add_special    whether to add the special tokens that begin a prompt. Default: false
    parse_special  without effect: special tokens in a text are always recognised
    with_pieces    whether to include the text of each token. Default: false
    """

    described_like: ClassVar = GenerationBody

    content: PromptText
    model: Name | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenizeChatBody(ChatBody, frozen=True, kw_only=True):
    """A conversation to tokenize. Fields about the answer have no effect.

    return_token_strs  whether to include each token as the vocabulary spells it. Default: false
    """

    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens to turn into text.

    tokens  the token ids. Example: [15043, 29892]
    """

    described_like: ClassVar = GenerationBody

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)]
    model: Name | None = None
