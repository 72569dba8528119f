"""Request bodies of Ollama's API: field types and bounds.

The fields are those of Ollama's OpenAPI document (docs/openapi.yaml in its repository). As there,
options and fields that do not exist have no effect. The response lists them in a header.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from gateway.api.encode.requests import Count, Texts
from gateway.api.openai.item_schemas import (
    CALLED_NAME_SCHEMA,
    PARAMETERS_SCHEMA,
    REASONING_SCHEMA,
    TEXT_SCHEMA,
    TOOL_ABOUT_SCHEMA,
    TOOL_NAME_SCHEMA,
    JsonSchemaDict,
    member,
    object_schema,
)
from gateway.api.openai.requests import MAX_MESSAGES, MAX_TOOLS, GenerationBody, Stop
from gateway.http.text_fields import Label, Name, PromptText, TemplateText
from protocol.engine.sampling import (
    MAX_TOKENS,
    AdditivePenalty,
    MinP,
    Mirostat,
    MirostatEta,
    MirostatTau,
    NumLogprobs,
    RepetitionPenalty,
    Seed,
    Temperature,
    TokenId,
    TopK,
    TopP,
    TypicalP,
)

# ---- JSON Schemas of values that `translate` checks, for the OpenAPI document

_TEXT_OR_NULL: JsonSchemaDict = {"type": ["string", "null"]}
_CALLED = object_schema(
    ["name"],
    name=CALLED_NAME_SCHEMA,
    arguments=member("The arguments of the call.", {"type": "object"}),
)
_CALL = object_schema(
    ["function"],
    id=member("Id of the call, which the message with its result may repeat.", _TEXT_OR_NULL),
    function=member("The called function and its arguments.", _CALLED),
)
_MESSAGE = {"title": "OllamaMessage"} | object_schema(
    ["role"],
    role=member("Who speaks.", {"enum": ["system", "user", "assistant", "tool"]}),
    content=member("The text of the message, or what the tool returned.", _TEXT_OR_NULL),
    thinking=REASONING_SCHEMA,
    images=member(
        "Pictures in base64, which stand before the text.",
        {"type": ["array", "null"], "items": TEXT_SCHEMA},
    ),
    tool_calls=member(
        "The tools that the model called in this answer.",
        {"type": ["array", "null"], "items": _CALL},
    ),
    tool_name=member("Name of the tool whose result the message has.", _TEXT_OR_NULL),
    tool_call_id=member("Id of the call that this message answers.", _TEXT_OR_NULL),
)
_FUNCTION = object_schema(
    ["name"], name=TOOL_NAME_SCHEMA, description=TOOL_ABOUT_SCHEMA, parameters=PARAMETERS_SCHEMA
)
_TOOL = {"title": "OllamaTool"} | object_schema(
    ["function"],
    type={"const": "function"},
    function=member("A function, whose arguments are an object.", _FUNCTION),
)
_FORMAT: JsonSchemaDict = {"anyOf": [{"enum": ["", "json"]}, {"type": ["object", "null"]}]}

Message = Annotated[Any, Meta(extra_json_schema=_MESSAGE)]
Tool = Annotated[Any, Meta(extra_json_schema=_TOOL)]
Format = Annotated[Any, Meta(extra_json_schema=_FORMAT)]
Images = list[Annotated[PromptText, Meta(description="An image in base64.")]]


# ---- bodies


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one answer. Others have no effect: those about loading a model, such as `num_ctx`,
    are the operator's.

    num_predict     most tokens of the answer; 0 or less: until the context is full. Default: -1
    repeat_penalty  the repetition penalty, over the prompt and the whole answer. Default: the
                    model's, or 1
    """

    described_like: ClassVar = GenerationBody

    num_predict: Annotated[int, Meta(le=MAX_TOKENS)] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    typical_p: TypicalP | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: MirostatTau | None = None
    mirostat_eta: MirostatEta | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both /api/chat and /api/generate.

    model         name of the model
    format        "json", or a JSON Schema that the answer must match; "" means none.
                  Example: "json"
    options       sampling options of the answer. Example: {"temperature": 0.2, "num_predict": 100}
    stream        whether the answer is sent in lines while it is generated. Default: true
    think         whether the model thinks before it answers, or how much: low, medium, high.
                  Default: the model's
    keep_alive    how long the model stays loaded; only 0 has an effect, and only in a request
                  without a prompt: the model is unloaded
    logprobs      whether to report the logprob of each token. Default: false
    top_logprobs  with `logprobs`, the number of most likely tokens to report. Default: 0
    """

    model: Name
    format: Format | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: bool | Label | None = None
    keep_alive: float | Label | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None


class OllamaChatBody(OllamaBody, frozen=True, kw_only=True):
    """A conversation to answer. Without messages, the model is only loaded.

    messages  the conversation so far, oldest message first.
              Example: [{"role": "user", "content": "Hello!"}]
    tools     the functions that the model may call
    """

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateBody(OllamaBody, frozen=True, kw_only=True):
    """A message to answer, or a text to continue. Without a prompt and a suffix, the model is only
    loaded.

    prompt    the user's message; with `raw` or `suffix`, the text that the model continues.
              Example: "Once upon a time"
    suffix    the text after the answer, for models that can fill in the middle
    system    the system message
    raw       whether to use the prompt as it is, without the chat template. Default: false
    context   token ids from an earlier answer, which the prompt continues
    template  not supported; refused if set
    images    images in base64, for a model that reads images
    """

    prompt: PromptText | None = None
    suffix: PromptText | None = None
    images: Images | None = None
    system: PromptText | None = None
    template: TemplateText | None = None
    raw: bool | None = None
    context: list[TokenId] | None = None


class OllamaEncodeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both /api/embed and /api/embeddings.

    model                name of the model
    keep_alive, options  without effect
    """

    model: Name
    keep_alive: float | Label | None = None
    options: dict[str, Any] | None = None


class OllamaEmbedBody(OllamaEncodeBody, frozen=True, kw_only=True):
    """Texts to embed. Without an input, the model is only loaded.

    input       a text or a list of texts. Example: "What is a tide?"
    truncate    whether to shorten texts that are longer than the model takes. Default: true
    dimensions  keep this many leading numbers of each vector. Default: all
    """

    input: Texts | None = None
    truncate: bool | None = None
    dimensions: Count | None = None


class OllamaPromptEmbedBody(OllamaEncodeBody, frozen=True, kw_only=True):
    """A text to embed, for an older route. Without a prompt, the model is only loaded.

    prompt  the text. Example: "What is a tide?"
    """

    prompt: PromptText | None = None


class NamedModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A model, by its name.

    model  name of the model
    name   older spelling of `model`
    """

    model: Name | None = None
    name: Name | None = None


class OllamaPullBody(NamedModelBody, frozen=True, kw_only=True):
    """A model to download.

    stream  whether progress is sent in lines. Default: true
    """

    stream: bool | None = None


class OllamaCopyBody(msgspec.Struct, frozen=True, kw_only=True):
    """A model that gets one more name.

    source       name of the model
    destination  one more name for it
    """

    source: Name | None = None
    destination: Name | None = None
