"""POST /inference/v1/generate and abort_requests: what may be asked. Names and shapes are vLLM's.

As everywhere, a null is an absent field, a field that is not here has no effect and is named in the
response, and a field that would change what an answer means, and that this server cannot honour, is
here so that it can be refused (`REFUSED`, `REFUSED_SAMPLING`). No default of the model is applied:
what a trainer does not say is neutral, so that what is sampled from is what was asked.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api.openai.requests import (
    CacheSalt,
    Count,
    Object,
    Priority,
    SamplingFields,
    Stop,
    StreamOptions,
    Timeout,
)
from protocol.grammar import Grammar
from protocol.sampling import (
    MAX_TOKENS,
    LogprobsOf,
    LogprobTokenIds,
    NumLogprobs,
    TokenId,
)

MAX_REQUEST_IDS = 4096

RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")]
OutputMode = Literal["tokens", "text"]


class GenerateSampling(SamplingFields, frozen=True, kw_only=True):
    """`sampling_params`.

    n                   answers; answer i is drawn with `seed` + i
    max_tokens          absent: as much as the context leaves; 0: only compute the prompt
    seed                -1 is no seed
    logprobs            of each token chosen, and of so many likelier ones
    logprobs_of         of the model's distribution, of the one that is sampled from, or of both
    prompt_logprobs     of the prompt's tokens, always of the model's distribution
    detokenize          false: no text at all, so neither stop strings nor output_mode "text"
    structured_outputs  what the answer must look like, as in a chat request
    thinking_token_budget   most tokens of reasoning; -1: no limit
    skip_reading_prefix_cache   compute all of the prompt, whatever is cached

    Without effect here: spaces_between_special_tokens, output_kind.
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
    """chat_template_kwargs  with which the prompt was rendered"""

    chat_template_kwargs: Object | None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """request_id       the response's id is made of it; the header X-Request-Id goes first
    token_ids        the prompt
    token_offsets    told by a renderer; nothing here needs it
    reasoning_ended  whether an answer of one form begins with that form (true) or with thinking
                     (false); null: as the prompt's end says
    reads_calls      with reasoning_parser_kwargs: whether tool calls are looked for, in which no
                     stop string ends anything; null: they are
    return_token_ids   also tell the prompt's tokens
    output_mode      "text": also tell the text
    cache_salt       cached prompts are shared only between requests with an equal salt
    priority         lower goes first
    timeout_s, queue_timeout_s   how long it may take, and wait: docs/load.md
    grammar          what the answer must look like, complete; instead of structured_outputs
    kv_transfer_params   for routers: do_remote_decode, or do_remote_prefill with a handle; see
                     docs/api-tokens.md
    strict_params    fields without effect are an error
    timings          also tell where the time went
    """

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: GenerateSampling
    request_id: RequestId | None = None
    token_offsets: Any = None
    model: str | None = None
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

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """As the peer has it: only beside the usage at the end."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """request_ids  as answers tell them, with or without what stands before the request's own id"""

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_REQUEST_IDS)]


REFUSED = ("features", "content_parts", "ec_transfer_params")
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
"""Fields of `sampling_params`, and the values that ask for nothing."""

generate_decoder = msgspec.json.Decoder(GenerateBody)
abort_decoder = msgspec.json.Decoder(AbortBody)
