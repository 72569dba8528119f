"""What a client may ask, field by field: types and bounds, none of the meaning (see `checks`).

Types are those of `protocol.sampling`, so a number this route accepts is a number the engine
accepts. A field that is null is a field that is absent: None everywhere, and every default is
applied later, in `parameters`. Fields that are not here are accepted without effect (proxies add
their own) and named in the response; with `strict_params` they are refused. Fields that would
change what an answer means, and that this server cannot honour, are here so that they can be
refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.api.openai.documented import Message, Tool
from gateway.prompt.kwargs import ThinkingFields
from gateway.text.stop import MAX_STOP_STRINGS
from protocol.errors import InvalidRequest
from protocol.messages import MAX_TIMEOUT_S
from protocol.sampling import (
    MAX_BAD_WORDS,
    MAX_TOKENS,
    AdditivePenalty,
    AllowedTokenIds,
    LogitBias,
    LogprobTokenIds,
    MaxTokens,
    MinP,
    MinTokens,
    NumLogprobs,
    RepetitionPenalty,
    Seed,
    StopTokenIds,
    Temperature,
    TokenId,
    TopK,
    TopP,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_PRIORITY = 1 << 31

BadText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Count = Annotated[int, Meta(ge=1, le=1024)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=128)]
Object = dict[str, Any]


class StreamOptions(msgspec.Struct, frozen=True):
    """include_usage           a last chunk with the usage of all choices
    continuous_usage_stats  with it: in every other chunk the usage of its choice so far
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, and what of them is text: the same fields in every API.

    seed        -1 is no seed
    bad_words   texts that the answer never has, however they are spelt in tokens
    """

    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    frequency_penalty: AdditivePenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: AllowedTokenIds | None = None


class FormFields(SamplingFields, frozen=True, kw_only=True):
    """What an answer looks like, beside each API's own field for it; see `structured`.

    structured_outputs   one of json, json_object, regex, choice, grammar, structural_tag
    guided_json, guided_regex, guided_choice, guided_grammar   the same, as older vLLM has it
    structural_tag       the same
    regex, ebnf          the same, as SGLang has it
    json_schema          the same, as SGLang and llama.cpp have it
    grammar              GBNF, as llama.cpp has it; an empty text is none
    guided_whitespace_pattern, grammar_lazy, grammar_triggers   refused where they ask for anything
    """

    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structural_tag: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    grammar: Any = None
    guided_whitespace_pattern: Any = None
    grammar_lazy: Any = None
    grammar_triggers: Any = None


class GenerationBody(FormFields, frozen=True, kw_only=True):
    """What both routes understand.

    n                   answers per prompt; answer i is drawn with `seed` + i
    cache_salt          cached prompts are shared only between requests with an equal salt
    priority            lower goes first
    timeout_s, queue_timeout_s   how long it may take, and wait: docs/load.md
    return_token_ids    also give the ids of prompt and answer
    prompt_logprobs     also give logprobs of the prompt's tokens, and of so many likelier ones
    logprob_token_ids   tokens whose logprobs are told beside the most likely ones
    kv_transfer_params  for routers: do_remote_decode, or do_remote_prefill with a handle; see
                        docs/api-tokens.md
    strict_params       fields without effect are an error
    timings             also tell where the time went
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: MaxTokens | None = None
    stop: Stop | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    strict_params: bool | None = None
    timings: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    queue_timeout_s: Timeout | None = None
    user: str | None = None
    kv_transfer_params: Object | None = None
    best_of: Any = None
    response_format: Any = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """As the peer has it: only beside the usage at the end."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def max_tokens_field(self) -> str:
        """The field that limits the answer's length, as the client spelled it."""
        return "max_tokens"


class ConversationBody(GenerationBody, frozen=True, kw_only=True):
    """What routes with conversations understand, beside the conversations.

    reasoning_effort, reasoning, thinking, enable_thinking
                              spellings of one wish: see `chat.kwargs`
    include_reasoning         false: reasoning is read, and not told
    return_effective_kwargs   also tell what the template was told
    chat_template             taken only where the operator trusts requests
    """

    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object | None = None
    return_effective_kwargs: bool | None = None
    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: Any = None
    include_reasoning: bool | None = None
    thinking_token_budget: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """The most likely tokens to tell beside the chosen one; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def answer_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def thinking_fields(self) -> ThinkingFields:
        return ThinkingFields(
            reasoning_effort=self.reasoning_effort,
            reasoning=self.reasoning,
            thinking=self.thinking,
            enable_thinking=self.enable_thinking,
            thinking_token_budget=self.thinking_token_budget,
        )


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(ConversationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages


class BatchBody(ConversationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions/batch: many conversations, and what holds for all of them."""

    messages: Annotated[list[Messages], Meta(min_length=1)]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is a text, texts, a list of token ids, or several of those."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: Any = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def answer_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for completions only: a chat goes on until it ends or the context is full."""

Prompt = str | list[int]

chat_decoder = msgspec.json.Decoder(ChatBody)
batch_decoder = msgspec.json.Decoder(BatchBody)
completion_decoder = msgspec.json.Decoder(CompletionBody)


def prompts_of(body: CompletionBody, max_prompts: int) -> list[Prompt]:
    """One or many, all of one kind. Raises InvalidRequest."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt: must not be an empty list", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequest(
            "prompt: texts, token ids and lists of token ids cannot be mixed", param="prompt"
        )
    if kinds == {int}:  # which mypy cannot see, nor that else there are none
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > max_prompts:
        raise InvalidRequest(
            f"prompt: {len(prompt):,} prompts; at most {max_prompts:,} are taken", param="prompt"
        )
    return prompt  # type: ignore[return-value]


def empty_prompt(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: this prompt has no tokens", param=param)
