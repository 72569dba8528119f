"""Response bodies of Ollama's API: records of an answer, models, errors.

A streamed answer is one record per line. A whole answer is one record. Durations are in
nanoseconds, and come from the request's record, like metrics and the access log.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.formats.events import Finished
from gateway.generation.group import ChoiceGroup
from gateway.generation.record import answer_record
from gateway.http.errors import HTTPFault
from gateway.text.logprobs import ChatLogprob

encode = msgspec.json.encode
DoneReason = Literal["stop", "length", "abort", "load", "unload"]
_DONE_REASONS: Mapping[str, DoneReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "abort": "abort",
}
"""Finish reason -> done reason."""
API_VERSION = "0.33.0"
"""The version of Ollama whose API this is. Clients compare it with the versions they need: Codex
requires 0.13.4, since which Ollama serves the Responses API."""


class OllamaError(msgspec.Struct, frozen=True):
    error: str


def error_body(fault: HTTPFault) -> bytes:
    return encode(OllamaError(fault.message))


def timestamp(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it.

    seconds  since 1970; None: now
    """
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


# ---- answers


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a call names. `index` counts the calls of the answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message, or a delta of it. Each call is in one delta."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class RecordWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that did not prevent the answer."""

    code: str
    message: str


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True):
    """The members of every record of an answer. Those after `done` are in the last record only.

    total_duration        time from the start of the request to the end of the answer
    load_duration         time waiting for the model to be loaded
    prompt_eval_count     prompt tokens, including those that were cached
    prompt_eval_duration  time of the prefill, until the first token
    eval_duration         time from the first token to the last one
    warnings              problems that did not prevent the answer; Ollama does not define this
    """

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    warnings: list[RecordWarning] | UnsetType = UNSET


class OllamaChatAnswer(AnswerLine, frozen=True, kw_only=True):
    message: AnswerMessage


class OllamaGenerated(AnswerLine, frozen=True, kw_only=True):
    """A record of /api/generate.

    context  token ids of the prompt and the answer, which a later request may continue; absent if
             the prompt was raw
    """

    response: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


def last_members(group: ChoiceGroup, finished: Finished, waited_s: float) -> dict[str, Any]:
    """Return the members that only the last record of an answer has.

    waited_s  time that the request has waited for its model
    """
    record = answer_record(group.timeline, group)
    return {
        "done": True,
        "done_reason": _DONE_REASONS[finished.reason],
        "total_duration": nanoseconds(record.answered_s),
        "load_duration": nanoseconds(waited_s),
        "prompt_eval_count": record.prompt_tokens,
        "prompt_eval_duration": nanoseconds(record.times.prefill_s),
        "eval_count": record.generated_tokens,
        "eval_duration": nanoseconds(record.times.decode_s),
    }


class OllamaEmbedded(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of texts, each of length 1.

    prompt_eval_count  tokens of all texts
    """

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, frozen=True):
    """The vector of one text."""

    embedding: list[float]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


# ---- models


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model. They are empty if the model has not been loaded yet.

    format              format of the model's files: gguf or safetensors
    quantization_level  type of most quantised weights in the files, such as Q4_1; without any, the
                        type of the weights in memory
    """

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. `size` is that of its weights in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelTags(msgspec.Struct, frozen=True):
    models: list[ModelSummary]


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is loaded.

    expires_at  far in the future: a model stays loaded unless the operator limits that
    size_vram   always 0, because a gateway has no facts about devices
    """

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct, frozen=True):
    models: list[RunningModel]


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one model.

    parameters    lines with a name and a value: the length of the context, sampling defaults
    template      the chat template, in Jinja
    capabilities  those of completion, embedding, tools, thinking, insert (fill in the middle) and
                  vision that the model has
    """

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    """The version of Ollama's API that is served, and of this server."""

    version: str
    tidegate: str


class PullStatus(msgspec.Struct, frozen=True):
    """A line of a download. The last one has the status "success".

    status     the stage, in words
    digest     digest of the file that is being received
    total      its size in bytes
    completed  bytes of it that are here
    """

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
