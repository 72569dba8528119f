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

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.api.openai.item_schemas import Message, Tool
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
    Mirostat,
    MirostatEta,
    MirostatTau,
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


# ---- bodies


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream.

    include_usage           whether a last chunk has the usage of all choices. Default: false
    continuous_usage_stats  with `include_usage`, whether every other chunk has the usage so far.
                            Default: false
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
    """Sampling and detokenizing fields that all APIs share. A default of 1 or 0 applies if the
    model has none of its own.

    min_tokens          fewest tokens of the answer: no stop token is sampled before. Default: 0
    temperature         how random the answer is: logits are divided by it. With 0 each token is the
                        most likely one. Default: the model's, or 1
    top_p               sample only from the smallest set of most likely tokens whose probabilities
                        sum to this. Default: the model's, or 1, which is off
    top_k               sample only from this many most likely tokens. 0 and -1 are off. Default:
                        the model's, or off
    min_p               sample only from tokens at least this many times as likely as the most
                        likely one. Default: the model's, or 0, which is off
    seed                the same request with the same seed has the same answer. -1 means no seed.
                        Default: a random one
    frequency_penalty   subtracted from the logit of a token for each time it is in the answer.
                        Default: the model's, or 0
    presence_penalty    subtracted once from the logit of each token in the answer. Default: the
                        model's, or 0
    repetition_penalty  above 1, makes the tokens of prompt and answer less likely: positive logits
                        are divided by it, negative ones multiplied. Default: the model's, or 1
    typical_p           sample only from the tokens whose surprise is nearest to the entropy, until
                        their probabilities sum to this. Default: 1, which is off
    top_n_sigma         sample only from tokens whose logits are at most this many standard
                        deviations below the largest one. Default: 0, which is off
    dynatemp_range      the temperature varies by up to this amount with the entropy. Default: 0,
                        which is off
    dynatemp_exponent   exponent of the share of the largest entropy, which decides where in
                        `dynatemp_range` the temperature is. Default: 1
    xtc_probability     how often XTC applies. It excludes all tokens with a probability of at least
                        `xtc_threshold`, except the least likely of them. Default: 0, which is off
    xtc_threshold       the probability from which XTC excludes tokens; above 0.5 it excludes none.
                        Default: 0.1
    mirostat            the version of Mirostat, 1 or 2, which keeps the mean surprise of tokens
                        near `mirostat_tau`. It replaces all filters except the temperature.
                        Default: 0, which is off
    mirostat_tau        the surprise in bits that Mirostat aims at. Default: 5
    mirostat_eta        how fast the limit of Mirostat follows the surprise of each token.
                        Default: 0.1
    dry_multiplier      strength of DRY, which makes repetitions unlikely. A token that continues
                        one of n tokens loses `dry_multiplier` * `dry_base` ** (n -
                        `dry_allowed_length`). Default: 0, which is off
    dry_base            how fast the penalty of DRY grows with a repetition. Default: 1.75
    dry_allowed_length  repetitions of fewer tokens have no penalty of DRY. Default: 2
    dry_penalty_last_n  number of latest tokens, prompt included, that DRY searches. -1 means all, 0
                        is off. Default: -1
    dry_sequence_breakers   texts over which no repetition continues. Default: those of llama.cpp.
                        Example: ["\\n", ":", "\\"", "*"]
    samplers            the samplers to apply, in this order, by llama.cpp's names; others are off.
                        Default: all. Example: ["penalties", "top_k", "top_p", "temperature"]
    logit_bias          numbers that are added to the logits of tokens: an object with token ids, or
                        llama.cpp's list of pairs of a token id or a text, and a number; false
                        instead of a number bans the token. Example: {"15043": -5}
    stop_token_ids      tokens that end the answer, besides the end tokens of the model
    ignore_eos          whether the answer continues after the end tokens of the model. Default:
                        false
    skip_special_tokens  whether special tokens are left out of the text. Default: true
    include_stop_str_in_output   whether the text includes the stop string that ended it. Default:
                        false
    bad_words           texts that the answer must not contain, in any tokenization.
                        Example: ["however"]
    allowed_token_ids   the only tokens that may be sampled; end tokens are not exempt
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
    mirostat: Mirostat | None = None
    mirostat_tau: MirostatTau | None = None
    mirostat_eta: MirostatEta | None = None
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

    structured_outputs   what the answer must match: an object with json, json_object, regex,
                         choice, grammar or structural_tag. Example: {"choice": ["yes", "no"]}
    guided_json, guided_regex, guided_choice, guided_grammar   the constraint of
                         `structured_outputs` with this name, as in older versions of vLLM
    structural_tag       the member of `structured_outputs` with this name, as in SGLang
    regex                a regular expression that the answer must match, as in SGLang
    ebnf                 a grammar that the answer must match, as in SGLang
    json_schema          a JSON Schema that the answer must match, as in SGLang and llama.cpp
    grammar              a grammar in GBNF that the answer must match, as in llama.cpp; an empty
                         string means none
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

    model               name of the model, or of an adapter. Default: the only model of the server
    stream              whether the answer is sent in pieces while it is generated. Default: false
    stream_options      options of a stream; only with `stream`. Example: {"include_usage": true}
    n                   number of choices per prompt; choice i is sampled with `seed` + i. Default:
                        1
    max_tokens          most tokens of the answer. Default: until the context is full
    stop                a text, or a list of texts, that end the answer. Example: ["\\n\\n"]
    return_token_ids    whether to include the token ids of prompt and answer. Default: false
    prompt_logprobs     include logprobs of the prompt tokens and of this many top tokens
    logprob_token_ids   token ids whose logprobs are included in addition to the top tokens
    strict_params       whether fields without effect are refused. Default: false, which lists them
                        in `ignored_params` of the response
    timings             whether to include how long each stage took. Default: false
    cache_salt          requests share cached prompts only if their salts are equal
    priority            lower values are scheduled first. Default: 0
    timeout_s           most seconds that the request may take; then it is ended. Default: the
                        server's limit
    queue_timeout_s     most seconds that the request may wait in the queue. Default: the server's
                        limit
    user                an identifier of the end user; without effect
    kv_transfer_params  for routers that compute prompt and answer on different engines:
                        do_remote_decode, or do_remote_prefill with a handle
    best_of             accepted only if it equals `n`
    response_format     the form of the answer: text, json_object or json_schema.
                        Example: {"type": "json_object"}
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

    max_completion_tokens     newer name of `max_tokens`
    logprobs                  whether to include the logprob of each token of the answer. Default:
                              false
    top_logprobs              with `logprobs`, the number of most likely tokens to report at each
                              place. Default: 0
    tools                     the functions that the model may call, with a JSON Schema of their
                              arguments
    tool_choice               whether the model must call a function: none, auto or required, or the
                              function to call. Default: auto with `tools`. Example: "required"
    parallel_tool_calls       whether one answer may have several calls. Default: true
    documents                 texts that the chat template inserts, if it can
    chat_template             a Jinja template that is used instead of the model's. It is accepted
                              only if the server runs with --trust-request-chat-template
    chat_template_kwargs      further arguments of the chat template.
                              Example: {"enable_thinking": false}
    return_effective_kwargs   whether to include the arguments that the chat template received.
                              Default: false
    reasoning_effort          how much the model thinks before it answers. Default: the model's.
                              Example: "low"
    reasoning                 the thinking options as an object with effort, enabled or max_tokens,
                              as in OpenRouter's API
    thinking                  the thinking options as an object with type and budget_tokens, as in
                              Anthropic's API
    enable_thinking           whether the model thinks before it answers. Default: the model's
    include_reasoning         whether the response has the reasoning. Default: true
    thinking_token_budget     most tokens of the reasoning, after which the answer must begin. -1
                              means no limit. Default: no limit
    add_generation_prompt     whether the prompt ends with the start of an answer. Default: true,
                              unless the last message is continued
    continue_final_message    whether the answer continues the last message instead of a new one.
                              Default: false
    functions, function_call  not supported; older names of `tools` and `tool_choice`
    modalities                accepted only if it is ["text"]
    audio                     not supported; refused if set
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
    """A conversation to answer, and how.

    messages  the conversation so far, oldest message first.
              Example: [{"role": "user", "content": "Hello!"}]
    """

    messages: Messages


class BatchBody(ConversationBody, frozen=True, kw_only=True):
    """Several conversations to answer. All fields except `messages` apply to each of them.

    messages  a list of conversations, each a list of messages.
              Example: [[{"role": "user", "content": "Hello!"}]]
    """

    messages: Annotated[list[Messages], Meta(min_length=1)]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """One or several texts to continue.

    prompt      a text, token ids, or a list of either. Example: "Once upon a time"
    max_tokens  most tokens of the answer. Default: 16
    logprobs    include the logprobs of the tokens and of this many most likely ones
    echo        whether the answer begins with the prompt. Default: false
    suffix      the text after the completion, for models that can fill in the middle; empty: none
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
