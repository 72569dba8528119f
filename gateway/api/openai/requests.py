"""Request bodies of the OpenAI routes: field types and bounds.

`prepare` checks combinations of fields.

- The types come from `protocol.engine.sampling`, so the engine accepts every number these routes
  accept.
- A null field equals an absent field: both are None. `parameters` applies the defaults.
- Unknown fields have no effect, because proxies add their own. The response lists them in
  `ignored_params`; with `strict_params` they are refused.
- Unsupported fields that would change the answer are declared, so that `prepare` can refuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.http.text_fields import Label, Name, PromptText, TemplateText
from gateway.prompt.kwargs import ThinkingFields
from gateway.text.stop import MAX_STOP_STRINGS
from protocol.engine.messages import MAX_TIMEOUT_S
from protocol.engine.sampling import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_TOKENS,
    AdditivePenalty,
    AllowedTokenIds,
    BiasValue,
    DryAllowedLength,
    DryBase,
    DryMultiplier,
    DryPenaltyLastN,
    DynatempExponent,
    DynatempRange,
    LogitBias,
    LogprobTokenIds,
    MaxTokens,
    MinP,
    MinTokens,
    NumLogprobs,
    RepetitionPenalty,
    Samplers,
    Seed,
    StopTokenIds,
    Temperature,
    TokenId,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    XtcProbability,
    XtcThreshold,
)
from protocol.wire.errors import InvalidRequest

MAX_BREAKER_TEXTS = 16
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_PRIORITY = 1 << 31

BadText = Annotated[str, Meta(min_length=1, max_length=1024)]
BreakerText = Annotated[str, Meta(min_length=1, max_length=40)]
BreakerTexts = Annotated[list[BreakerText], Meta(max_length=MAX_BREAKER_TEXTS)]
BiasText = Annotated[str, Meta(min_length=1, max_length=1024)]
BiasPair = tuple[TokenId | BiasText, BiasValue | bool]
BiasPairs = Annotated[list[BiasPair], Meta(max_length=MAX_LOGIT_BIAS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Count = Annotated[int, Meta(ge=1, le=1024)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=128)]
Object = dict[str, Any]


# ---- messages and tools: schemas for the OpenAPI document
#
# Decoding does not use these schemas. `prompt.content` and `openai.tools` check the values step by
# step, so that an error can name the exact path. A decoder of unions could not name it.


JsonSchemaDict = dict[str, Any]
TEXT_SCHEMA: JsonSchemaDict = {"type": "string"}


def object_schema(required: Sequence[str], **properties: JsonSchemaDict) -> JsonSchemaDict:
    return {"type": "object", "required": list(required), "properties": properties}


TOOL_NAME_SCHEMA: JsonSchemaDict = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
PARAMETERS_SCHEMA: JsonSchemaDict = {
    "type": "object",
    "description": "A JSON Schema of type object.",
    "properties": {"type": {"const": "object"}},
}
_PART = object_schema(
    ["type", "text"], type={"enum": ["text", "input_text", "output_text"]}, text=TEXT_SCHEMA
)
_CONTENT = {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": _PART, "minItems": 1}]}
_ARGUMENTS = {**TEXT_SCHEMA, "description": "The JSON text of an object."}
_CALLED = object_schema(["name", "arguments"], name=TEXT_SCHEMA, arguments=_ARGUMENTS)
_CALL = {
    "anyOf": [
        object_schema(
            ["id", "function"], id=TEXT_SCHEMA, type={"const": "function"}, function=_CALLED
        ),
        object_schema(
            ["id", "type", "custom"],
            id=TEXT_SCHEMA,
            type={"const": "custom"},
            custom=object_schema(["name", "input"], name=TEXT_SCHEMA, input=TEXT_SCHEMA),
        ),
    ]
}
_MESSAGE = {
    "title": "Message",
    "anyOf": [
        object_schema(
            ["role", "content"],
            role={"enum": ["system", "developer", "user"]},
            content=_CONTENT,
            name=TEXT_SCHEMA,
        ),
        object_schema(
            ["role"],
            role={"const": "assistant"},
            content={"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
            reasoning={"type": ["string", "null"]},
            tool_calls={"type": "array", "items": _CALL},
        ),
        object_schema(
            ["role", "content"], role={"const": "tool"}, content=_CONTENT, tool_call_id=TEXT_SCHEMA
        ),
    ],
}
_FUNCTION = object_schema(
    ["name"],
    name=TOOL_NAME_SCHEMA,
    description=TEXT_SCHEMA,
    parameters=PARAMETERS_SCHEMA,
    strict={"type": ["boolean", "null"]},
)
GRAMMAR_SCHEMA = object_schema(
    ["syntax", "definition"], syntax={"enum": ["lark", "regex"]}, definition=TEXT_SCHEMA
)
_CUSTOM = object_schema(
    ["name"],
    name=TOOL_NAME_SCHEMA,
    description=TEXT_SCHEMA,
    format={
        "anyOf": [
            object_schema(["type"], type={"const": "text"}),
            object_schema(["type", "grammar"], type={"const": "grammar"}, grammar=GRAMMAR_SCHEMA),
        ]
    },
)
_TOOL = {
    "title": "Tool",
    "anyOf": [
        object_schema(["type", "function"], type={"const": "function"}, function=_FUNCTION),
        object_schema(["type", "custom"], type={"const": "custom"}, custom=_CUSTOM),
    ],
}
Message = Annotated[Any, Meta(extra_json_schema=_MESSAGE)]
"""An OpenAI message."""
Tool = Annotated[Any, Meta(extra_json_schema=_TOOL)]
"""An OpenAI tool."""


# ---- bodies


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream.

    include_usage           send a last chunk with the usage of all choices
    continuous_usage_stats  with include_usage, add the usage so far to every other chunk
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def includes_usage(options: StreamOptions | None) -> bool:
    """Return whether the stream ends with the total usage."""
    return bool(options and options.include_usage)


def repeats_usage(options: StreamOptions | None) -> bool:
    """Return whether every chunk has a usage. As in vLLM, this requires include_usage."""
    return bool(options and options.include_usage and options.continuous_usage_stats)


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and detokenizing fields that all APIs share.

    seed        -1 means no seed
    logit_bias  an object with token ids, or llama.cpp's list of pairs of a token id or a text, and
                a number; false instead of a number bans the token
    bad_words   texts that the answer must not contain, in any tokenization
    dry_sequence_breakers   texts over which no repetition continues; absent: those of llama.cpp
    samplers    the samplers to apply, in this order, by llama.cpp's names
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
    typical_p: TypicalP | None = None
    top_n_sigma: TopNSigma | None = None
    dynatemp_range: DynatempRange | None = None
    dynatemp_exponent: DynatempExponent | None = None
    xtc_probability: XtcProbability | None = None
    xtc_threshold: XtcThreshold | None = None
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: DryAllowedLength | None = None
    dry_penalty_last_n: DryPenaltyLastN | None = None
    dry_sequence_breakers: BreakerTexts | None = None
    samplers: Samplers | None = None
    logit_bias: LogitBias | BiasPairs | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: AllowedTokenIds | None = None


class FormFields(SamplingFields, frozen=True, kw_only=True):
    """Structured output fields, in addition to each API's own field.

    structured_outputs   an object with json, json_object, regex, choice, grammar or structural_tag
    guided_json, guided_regex, guided_choice, guided_grammar   the same constraints, from older vLLM
    structural_tag       like the member of structured_outputs with this name
    regex, ebnf          from SGLang
    json_schema          from SGLang and llama.cpp
    grammar              GBNF, from llama.cpp; an empty string means none
    guided_whitespace_pattern, grammar_lazy, grammar_triggers   not supported; refused if set
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
    """Fields of both chat completions and text completions.

    n                   number of choices per prompt; choice i is sampled with `seed` + i
    cache_salt          requests share cached prompts only if their salts are equal
    priority            lower values are scheduled first
    timeout_s, queue_timeout_s   limits in seconds on the total time and the time in the queue;
                        see docs/operate/load.md
    return_token_ids    include the token ids of prompt and answer
    prompt_logprobs     include logprobs of the prompt tokens and of this many top tokens
    logprob_token_ids   token ids whose logprobs are included in addition to the top tokens
    kv_transfer_params  for routers: do_remote_decode, or do_remote_prefill with a handle; see
                        docs/use/api-tokens.md
    strict_params       refuse fields that have no effect
    timings             include how long each stage took
    """

    model: Name | None = None
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
    user: Label | None = None
    kv_transfer_params: Object | None = None
    best_of: Any = None
    response_format: Any = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def max_tokens_field(self) -> str:
        """The name of the field that limits the answer's length, as the client spelled it."""
        return "max_tokens"


class ConversationBody(GenerationBody, frozen=True, kw_only=True):
    """Fields of chat completions and batches, except the messages.

    reasoning_effort, reasoning, thinking, enable_thinking
                              alternative spellings of the thinking options
    include_reasoning         false omits the reasoning from the response
    return_effective_kwargs   include the arguments that the chat template received
    chat_template             accepted only if the server runs with --trust-request-chat-template
    """

    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Label | Object | None = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[Object], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template: TemplateText | None = None
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
        """The number of top tokens to report per sampled token; None if the response has no
        logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def answer_tokens(self) -> int | None:
        """The limit on the answer's length; None: the context length is the limit."""
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
    """The body of POST /v1/chat/completions."""

    messages: Messages


class BatchBody(ConversationBody, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions/batch. All fields except `messages` apply to every
    conversation."""

    messages: Annotated[list[Messages], Meta(min_length=1)]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """The body of POST /v1/completions. `prompt` is a text, token ids, or a list of either.

    suffix  the text after the completion, for models that can fill in the middle; empty: none
    """

    prompt: PromptText | list[PromptText | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: PromptText | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def answer_tokens(self) -> int | None:
        """The limit on the answer's length; None: the context length is the limit."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class OpenEndedCompletion(CompletionBody, frozen=True, kw_only=True):
    """A completion without OpenAI's default of `max_tokens`, for other APIs."""

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens


DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. The answer in a chat is limited only by the
context length."""

CompletionPrompt = str | list[int]


def prompts_of(body: CompletionBody, max_prompts: int) -> list[CompletionPrompt]:
    """Return the prompts of a body. Raise InvalidRequest if there are none or too many, or if they
    are of different kinds."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest.wrong("prompt", "a list of at least 1 item", prompt)
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequest.at("prompt", "cannot mix texts, token ids and lists of token ids")
    if kinds == {int}:  # mypy cannot infer that the prompt is a list of ids here
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > max_prompts:
        raise InvalidRequest.at(
            "prompt", f"{len(prompt):,} prompts exceed this server's limit of {max_prompts:,}"
        )
    return prompt  # type: ignore[return-value]


def empty_prompt(param: str) -> InvalidRequest:
    return InvalidRequest.at(param, "the prompt has no tokens")


def unsupported(field: str, instead: str = "") -> InvalidRequest:
    advice = f"; {instead}" if instead else ""
    return InvalidRequest.at(field, f"not supported by this server{advice}")
