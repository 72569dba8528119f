"""Converts responses of a token endpoint into responses of the API ("derenders" them), complete or
in chunks.

The recorded outputs are replayed through the code that serves our own engine: parsers, finish
reason, `whole_response`, `AnswerChunks`. Between two chunks the client keeps all state
(`stream_state`), so the cost of a chunk does not depend on its position.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.requests import GenerationBody
from gateway.api.openai.response_builder import (
    CompletionResponseBuilder,
    OpenAIEnvelope,
    ResponseBuilder,
    prompt_logprobs_builder,
)
from gateway.api.openai.responses import AnswerWarning, Effective
from gateway.api.openai.stream import AnswerChunks, ChunkStreamState, chunk_options, whole_response
from gateway.api.render.recorded import RecordedGroup, RecordedOutputs, prompt_entries
from gateway.api.render.stream_state import StreamState, restore, state_of, wrong_state
from gateway.api.tokens.responses import GenerateChunk, GeneratedChoice, GenerateResponse
from gateway.formats.choice_parser import ChoiceParser
from gateway.formats.events import OutputDelta, OutputWarning
from gateway.generation.request import Choice, PromptRequest
from gateway.generation.sinks import CollectSink
from gateway.served_model import ServedModel
from gateway.text.detokenizer import DetokenizerState
from protocol.wire.errors import InvalidRequest, ServingError

log = logging.getLogger(__name__)
Json = dict[str, Any]

GENERATE_PREFIX = "generate-tokens-"
MAX_WAITING_TOKENS = 64
"""While the parser holds text back, at most this many tokens wait for it. If there are more, they
are sent without their text, which follows later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerenderCase:
    """A chat or completion request whose generated tokens are derendered."""

    #: The request that was rendered.
    request: GenerationBody
    model: ServedModel
    #: Prefix of the response id.
    kind: str
    #: Formats the choices of one response.
    builder: ResponseBuilder
    #: The `effective` member of the response, if it is requested.
    effective: Effective | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.builder.num_logprobs

    def envelope(
        self, generated_id: str, fingerprint: Any, created: int, extensions: dict[str, Any]
    ) -> OpenAIEnvelope:
        extensions = dict(extensions)
        if self.effective is not None:
            extensions["effective"] = self.effective
        return OpenAIEnvelope(
            _response_id(generated_id, self.kind),
            self.request.model or self.model.names[0],
            self.model.fingerprint if fingerprint is UNSET else fingerprint,
            created,
            extensions,
        )

    def outputs(self, at: str, usage: Any) -> RecordedOutputs:
        logprob_ids = self.request.logprob_token_ids or ()
        return RecordedOutputs(
            at, self.model, num_logprobs=self.num_logprobs, extra_ids=logprob_ids, usage=usage
        )


def _response_id(generated_id: str, kind: str) -> str:
    """Return the id of the API's response: the token endpoint's id with the prefix `kind`."""
    own = generated_id.removeprefix(GENERATE_PREFIX)
    return own if own.startswith(f"{kind}-") else f"{kind}-{own}"


# ---- whole


def derendered(
    case: DerenderCase,
    prompt_requests: Sequence[PromptRequest],
    responses: Sequence[GenerateResponse],
    at: Sequence[str],
    prompt_tokens: int | None = None,
) -> bytes:
    """Return the complete response as JSON. Raise InvalidRequest naming the field.

    responses      responses of the token endpoint, one per prompt
    at             the path of each response in the request
    prompt_tokens  number of prompt tokens; None: count the token ids
    """
    request, model = case.request, case.model
    group = RecordedGroup(prompt_requests, prompt_tokens)
    collected = CollectSink(len(group.choices))
    group.attach(collected)
    for place, (response, where) in enumerate(zip(responses, at, strict=True)):
        choices = [choice for choice in group.choices if choice.prompt_index == place]
        _restore_warnings(choices, response.warnings)
        _replay_whole(case, choices, response, where, group)
    group.wait()
    first = responses[0]
    extensions: dict[str, Any] = {}
    if len(responses) == 1 and first.kv_transfer_params is not None:
        extensions["kv_transfer_params"] = first.kv_transfer_params
    return whole_response(
        group,
        collected,
        case.builder,
        case.envelope(
            first.request_id,
            first.system_fingerprint,
            int(time.time()) if first.created is None else first.created,
            extensions,
        ),
        includes_ids=bool(request.return_token_ids),
        prompt_logprobs=prompt_logprobs_builder(request, model)
        or _recorded_prompt_logprobs(responses),
    )


def _restore_warnings(
    choices: Sequence[Choice], warnings: Sequence[AnswerWarning] | UnsetType
) -> None:
    """Let choices end with the warnings of their recorded answers. `choices` are those of one
    response of the token endpoint, which numbers them from 0."""
    for warning in warnings or ():
        if warning.choice is not None and 0 <= warning.choice < len(choices):
            choices[warning.choice].warning = OutputWarning(warning.code, warning.message)


def _recorded_prompt_logprobs(
    responses: Sequence[GenerateResponse],
) -> Callable[[Choice], list[Any] | None]:
    """Return a function that returns the prompt logprobs in a choice's response unchanged. It is
    used if the request does not set `prompt_logprobs`."""
    return lambda choice: responses[choice.prompt_index].prompt_logprobs


def _replay_whole(
    case: DerenderCase,
    choices: Sequence[Choice],
    response: GenerateResponse,
    at: str,
    group: RecordedGroup,
) -> None:
    """Replay a complete response. `choices` are the choices of its prompt."""
    parts = {part.index: (place, part) for place, part in enumerate(response.choices)}
    if len(response.choices) != len(choices) or set(parts) != set(range(len(choices))):
        raise InvalidRequest.at(
            f"{at}.choices",
            f"must have each index from 0 to {len(choices) - 1} once (n is {len(choices)})",
        )
    outputs = case.outputs(at, response.usage)
    for index, choice in enumerate(choices):
        place, part = parts[index]
        if part.finish_reason is None:
            where = f"{at}.choices[{place}].finish_reason"
            raise InvalidRequest.at(where, "must not be null in a complete response")
        if response.prompt_logprobs is not None and choice.params.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_entries(
                choice.prompt_request.prompt_ids, response.prompt_logprobs, f"{at}.prompt_logprobs"
            )
        group.replay(choice, outputs.output(part, choice.params, place))


# ---- chunk by chunk


def derendered_chunk(
    case: DerenderCase,
    prompt_request: PromptRequest,
    state: StreamState,
    chunk: GenerateChunk,
    *,
    is_first: bool,
) -> tuple[Json | None, StreamState]:
    """Return (the API's chunk, the next state). The chunk is None if there is nothing to send yet.

    prompt_request  its prompt token ids are needed for the first chunk only
    is_first        whether `state` is new; if not, the client sent it and it may be forged

    Raises InvalidRequest, naming the field, if the chunk is invalid or does not fit the state.
    """
    try:
        derenderer = _ChunkDerenderer(case, prompt_request, state)
        return derenderer.derender(chunk), derenderer.state()
    except ServingError:
        raise
    except Exception:  # a forged state can make any parser fail
        if is_first:
            raise
        log.info("cannot restore a stream_state", exc_info=True)
        raise wrong_state() from None


def first_state(ending: str, prompt_tokens: int) -> StreamState:
    return StreamState(int(time.time()), ending, prompt_tokens, ChunkStreamState(), {})


class _ChunkDerenderer:
    """Derenders one chunk, starting from the state after the previous chunk. It is the sink of its
    group."""

    def __init__(
        self, case: DerenderCase, prompt_request: PromptRequest, state: StreamState
    ) -> None:
        self._case = case
        self._state = state
        self._sent: list[Any] = []
        self._group = RecordedGroup([prompt_request], state.prompt_tokens)
        for index, choice_state in state.choices.items():
            restore(self._group.choices[index], choice_state)
            if choice_state.offsets is not None and isinstance(
                case.builder, CompletionResponseBuilder
            ):
                case.builder.offsets(index, choice_state.offsets)
        self._group.attach(self)

    def derender(self, chunk: GenerateChunk) -> Json | None:
        self._chunks = self._new_chunks(chunk)
        if chunk.choices:
            self._sent += self._chunks.start()
        outputs = self._case.outputs("generate_chunk", chunk.usage)
        _restore_warnings(self._group.choices, chunk.warnings)
        for place, part in enumerate(chunk.choices):
            choice = self._choice(part, place)
            self._group.replay(choice, outputs.output(part, choice.params, place))
            self._release(choice)
        if not chunk.choices and chunk.usage is not None:
            if (details := chunk.usage.prompt_tokens_details) is not None:
                self._group.choices[0].num_cached = details.cached_tokens
            self._sent += filter(None, [self._chunks.end()])
        if not self._sent:
            return None
        merged = _merged_chunk(map(msgspec.to_builtins, self._sent))
        if isinstance(chunk.kv_transfer_params, dict):
            merged["kv_transfer_params"] = chunk.kv_transfer_params
        return merged

    def state(self) -> StreamState:
        """Return the state for the next chunk."""
        choices = dict(self._state.choices)
        for choice in self._group.choices:
            if choice.num_generated or choice.index in choices:
                choices[choice.index] = state_of(choice, self._offsets(choice))
        return msgspec.structs.replace(self._state, choices=choices)

    # ---- as a sink

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        self._sent += self._chunks.push(choice, delta)

    def end(self) -> None:
        """Do nothing. The chunk with the usage, which arrives later, is the end of the stream."""

    def fail(self, error: ServingError) -> None:
        raise error

    # ---- parts

    def _new_chunks(self, chunk: GenerateChunk) -> AnswerChunks:
        request, state = self._case.request, self._state
        return AnswerChunks(
            self._group,
            self._case.builder,
            self._case.envelope(chunk.request_id, chunk.system_fingerprint, state.created, {}),
            state=state.chunks,
            **chunk_options(request),
        )

    def _choice(self, part: GeneratedChoice, place: int) -> Choice:
        choices = self._group.choices
        if not 0 <= part.index < len(choices):
            at = f"generate_chunk.choices[{place}].index"
            raise InvalidRequest.at(
                at, f"{part.index} is out of range; the request has {len(choices)} choices (n)"
            )
        return choices[part.index]

    def _release(self, choice: Choice) -> None:
        """Bound the number of tokens whose text the parser holds back.

        If the request needs neither token ids nor logprobs, these tokens are only counted.
        Otherwise they are sent before their text once there are more than MAX_WAITING_TOKENS.
        """
        parser = choice.parser
        assert isinstance(parser, ChoiceParser)
        if not (self._case.request.return_token_ids or self._case.num_logprobs is not None):
            self._chunks.count(choice, parser.release())
        elif parser.num_waiting > MAX_WAITING_TOKENS:
            self._sent += self._chunks.push(choice, parser.release())

    def _offsets(self, choice: Choice) -> tuple[DetokenizerState, int] | None:
        builder = self._case.builder
        if self._case.num_logprobs is None or not isinstance(builder, CompletionResponseBuilder):
            return None
        return builder.offsets(choice.index).state()


# ---- several chunks as one


def _merged_chunk(chunks: Iterable[Json]) -> Json:
    """Join several chunks into one. A client that joins deltas gets the same message."""
    choices: dict[int, Json] = {}
    whole: Json = {}
    for chunk in chunks:
        for choice in chunk.pop("choices"):
            before = choices.get(choice["index"])
            choices[choice["index"]] = choice if before is None else _merged(before, choice)
        warnings = [*whole.get("warnings", ()), *chunk.get("warnings", ())]
        whole |= chunk
        if warnings:
            whole["warnings"] = warnings
    return {**whole, "choices": list(choices.values())}


def _merged(before: Json, after: Json) -> Json:
    """Join the choice in a chunk with the same choice in the next chunk."""
    whole = before | after
    if "delta" in after:
        whole["delta"] = _merged_delta(before["delta"], after["delta"])
    if "text" in after:
        whole["text"] = before["text"] + after["text"]
    whole["logprobs"] = _merged_logprobs(before["logprobs"], after["logprobs"])
    if "token_ids" in before and "token_ids" in after:
        whole["token_ids"] = before["token_ids"] + after["token_ids"]
    return whole


def _merged_delta(before: Json, after: Json) -> Json:
    whole = before | after
    for name in ("content", "reasoning", "reasoning_content"):
        if name in before and name in after:
            whole[name] = before[name] + after[name]
    calls = [*before.get("tool_calls", ()), *after.get("tool_calls", ())]
    if calls:
        whole["tool_calls"] = _merged_calls(calls)
    return whole


def _merged_calls(calls: Iterable[Json]) -> list[Json]:
    """Merge consecutive arguments of the same tool call. The head of a call (id and name) stays a
    separate part without arguments, as in every stream."""
    whole: list[Json] = []
    for call in calls:
        before = whole[-1] if whole else call
        is_more = whole and "id" not in call and "id" not in before
        if is_more and before["index"] == call["index"]:
            before["function"]["arguments"] += call["function"]["arguments"]
        else:
            whole.append(call)
    return whole


def _merged_logprobs(before: Json | None, after: Json | None) -> Json | None:
    if before is None or after is None:
        return before or after
    return {
        name: None if items is None else [*items, *after[name]] for name, items in before.items()
    }
