"""Converts responses of a token endpoint into responses of the API, complete or in chunks.

The outputs are replayed through the code that serves our own engine: parsers, finish reason,
`whole_response`, `ChunkStream`. Between two chunks the client carries all state (`stream_state`),
so the cost of a chunk does not depend on its position.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from gateway.api.openai.requests import GenerationBody
from gateway.api.openai.respond import prompt_shape
from gateway.api.openai.response_builder import (
    CompletionResponseBuilder,
    OpenAIEnvelope,
    ResponseBuilder,
)
from gateway.api.openai.stream import ChunkStream, ChunkStreamState
from gateway.api.openai.whole import whole_response
from gateway.api.render.merging import chunk_of
from gateway.api.render.recorded import Recorded, Reports, prompt_entries
from gateway.api.render.stream_state import StreamState, restore, state_of, wrong_state
from gateway.api.tokens.generate_responses import GenerateChunk, GeneratedChoice, GenerateResponse
from gateway.formats.choice_parser import ChoiceParser
from gateway.formats.events import OutputDelta
from gateway.generation.choice import Choice
from gateway.generation.request import PromptRequest
from gateway.generation.sinks import CollectSink
from gateway.served_model import ServedModel
from gateway.text.detokenizer import DetokenizerState
from protocol.errors import InvalidRequest, ServingError

log = logging.getLogger(__name__)

GENERATE_PREFIX = "generate-tokens-"
MAX_WAITING_TOKENS = 64
"""If more tokens than this wait for held-back text, they are sent before their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerenderCase:
    """A rendered request of either API.

    kind       prefix of the response id
    builder    formats the choices of one response
    effective  the `effective` member, if requested
    """

    request: GenerationBody
    model: ServedModel
    kind: str
    dialect: ResponseBuilder
    effective: Any = None

    @property
    def num_logprobs(self) -> int | None:
        return self.dialect.num_logprobs

    def origin(
        self, said_id: str, fingerprint: Any, created: int, beside: dict[str, Any]
    ) -> OpenAIEnvelope:
        asides = dict(beside)
        if self.effective is not None:
            asides["effective"] = self.effective
        return OpenAIEnvelope(
            _own_id(said_id, self.kind),
            self.request.model or self.model.names[0],
            self.model.fingerprint if fingerprint is UNSET else fingerprint,
            created,
            asides,
        )

    def reports(self, at: str, usage: Any) -> Reports:
        asked = self.request.logprob_token_ids or ()
        return Reports(at, self.model, num_logprobs=self.num_logprobs, asked_ids=asked, usage=usage)


def _own_id(said: str, kind: str) -> str:
    """Return the API's response id, which is part of the token endpoint's id."""
    own = said.removeprefix(GENERATE_PREFIX)
    return own if own.startswith(f"{kind}-") else f"{kind}-{own}"


# ---- whole


def derendered(
    case: DerenderCase,
    asks: Sequence[PromptRequest],
    responses: Sequence[GenerateResponse],
    at: Sequence[str],
    prompt_tokens: int | None = None,
) -> bytes:
    """Return the complete response. Raise InvalidRequest.

    responses      one per prompt
    at             the path of each response in the request
    prompt_tokens  number of prompt tokens, if the ids are unknown
    """
    request, model = case.request, case.model
    answer = Recorded(asks, prompt_tokens)
    fold = CollectSink(len(answer.choices))
    answer.attach(fold)
    for place, (response, where) in enumerate(zip(responses, at, strict=True)):
        choices = [choice for choice in answer.choices if choice.prompt_index == place]
        _play_whole(case, choices, response, where, answer)
    answer.wait()
    first = responses[0]
    beside: dict[str, Any] = {}
    if len(responses) == 1 and first.kv_transfer_params is not None:
        beside["kv_transfer_params"] = first.kv_transfer_params
    return whole_response(
        answer,
        fold,
        case.dialect,
        case.origin(
            first.request_id,
            first.system_fingerprint,
            int(time.time()) if first.created is None else first.created,
            beside,
        ),
        tells_ids=bool(request.return_token_ids),
        prompt_logprobs=prompt_shape(request, model) or _passed_on(responses),
    )


def _passed_on(
    responses: Sequence[GenerateResponse],
) -> Callable[[Choice], list[Any] | None]:
    """Return a function that passes on prompt logprobs unchanged, for requests without them."""
    return lambda choice: responses[choice.prompt_index].prompt_logprobs


def _play_whole(
    case: DerenderCase,
    choices: Sequence[Choice],
    response: GenerateResponse,
    at: str,
    answer: Recorded,
) -> None:
    parts = {part.index: (place, part) for place, part in enumerate(response.choices)}
    if len(response.choices) != len(choices) or set(parts) != set(range(len(choices))):
        raise InvalidRequest(
            f"{at}.choices: must have each index from 0 to {len(choices) - 1} once (n is "
            f"{len(choices)})",
            param=f"{at}.choices",
        )
    reports = case.reports(at, response.usage)
    for index, choice in enumerate(choices):
        place, part = parts[index]
        if part.finish_reason is None:
            where = f"{at}.choices[{place}].finish_reason"
            raise InvalidRequest(f"{where}: must not be null in a complete response", param=where)
        if response.prompt_logprobs is not None and choice.params.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_entries(
                choice.ask.prompt_ids, response.prompt_logprobs, f"{at}.prompt_logprobs"
            )
        answer.play(choice, reports.of(part, choice.params, place))


# ---- chunk by chunk


def derendered_chunk(
    case: DerenderCase,
    ask: PromptRequest,
    state: StreamState,
    chunk: GenerateChunk,
    *,
    is_first: bool,
) -> tuple[dict[str, Any] | None, StreamState]:
    """Return (the API's chunk or None if there is nothing to send yet, the next state).

    The ids of the prompt are needed for the first chunk only. Raises InvalidRequest.
    """
    try:
        going_on = _GoingOn(case, ask, state)
        return going_on.tell(chunk), going_on.state()
    except ServingError:
        raise
    except Exception:  # a forged state can make any parser fail
        if is_first:
            raise
        log.info("cannot restore a stream_state", exc_info=True)
        raise wrong_state() from None


def first_state(ending: str, prompt_tokens: int) -> StreamState:
    return StreamState(int(time.time()), ending, prompt_tokens, ChunkStreamState(), {})


class _GoingOn:
    """Derenders one chunk from one state to the next. It is the sink of its group."""

    def __init__(self, case: DerenderCase, ask: PromptRequest, state: StreamState) -> None:
        self._case = case
        self._state = state
        self._frames: list[bytes] = []
        self._answer = Recorded([ask], state.prompt_tokens)
        for index, told in state.choices.items():
            restore(self._answer.choices[index], told)
            if told.offsets is not None and isinstance(case.dialect, CompletionResponseBuilder):
                case.dialect.offsets(index, told.offsets)
        self._answer.attach(self)

    def tell(self, chunk: GenerateChunk) -> dict[str, Any] | None:
        self._stream = self._new_stream(chunk)
        if chunk.choices:
            self._stream.begin()
        reports = self._case.reports("generate_chunk", chunk.usage)
        for place, part in enumerate(chunk.choices):
            choice = self._choice(part, place)
            self._answer.play(choice, reports.of(part, choice.params, place))
            self._release(choice)
        if not chunk.choices and chunk.usage is not None:
            if (details := chunk.usage.prompt_tokens_details) is not None:
                self._answer.choices[0].num_cached = details.cached_tokens
            self._stream.end()
        told = chunk_of(self._frames)
        if told is not None and isinstance(chunk.kv_transfer_params, dict):
            told["kv_transfer_params"] = chunk.kv_transfer_params
        return told

    def state(self) -> StreamState:
        """Return the state for the next chunk."""
        choices = dict(self._state.choices)
        for choice in self._answer.choices:
            if choice.num_generated or choice.index in choices:
                choices[choice.index] = state_of(choice, self._offsets(choice))
        return msgspec.structs.replace(self._state, choices=choices)

    # ---- as a sink

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        self._stream.delta(choice, delta)

    def end(self) -> None:
        """Do nothing. The end is written with the usage, which has its own chunk."""

    def fail(self, error: ServingError) -> None:
        raise error

    # ---- parts

    def _new_stream(self, chunk: GenerateChunk) -> ChunkStream:
        request, state = self._case.request, self._state
        origin = self._case.origin(chunk.request_id, chunk.system_fingerprint, state.created, {})
        return ChunkStream(
            self._answer,
            self._case.dialect,
            origin,
            write=self._frames.append,
            finish=lambda: None,
            includes_usage=request.includes_usage,
            repeats_usage=request.repeats_usage,
            tells_ids=bool(request.return_token_ids),
            told=state.told,
        )

    def _choice(self, part: GeneratedChoice, place: int) -> Choice:
        choices = self._answer.choices
        if not 0 <= part.index < len(choices):
            at = f"generate_chunk.choices[{place}].index"
            raise InvalidRequest(
                f"{at}: {part.index} is out of range; the request has {len(choices)} choices (n)",
                param=at,
            )
        return choices[part.index]

    def _release(self, choice: Choice) -> None:
        """Bound the tokens that wait for held-back text; drop them if they are not reported."""
        reader = choice.reader
        assert isinstance(reader, ChoiceParser)
        if not (self._case.request.return_token_ids or self._case.num_logprobs is not None):
            self._stream.count(choice, reader.release())
        elif reader.num_waiting > MAX_WAITING_TOKENS:
            self._stream.delta(choice, reader.release())

    def _offsets(self, choice: Choice) -> tuple[DetokenizerState, int] | None:
        dialect = self._case.dialect
        if self._case.num_logprobs is None or not isinstance(dialect, CompletionResponseBuilder):
            return None
        return dialect.offsets(choice.index).state()
