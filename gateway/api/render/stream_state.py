"""The state of a derendered stream between two chunks, as text that the client carries.

The state contains an incomplete character, a possible start of a marker or stop string, the
position in a tool call, and counts. It does not contain the text that was sent, so its size does
not grow with the answer. It grows only with the text that a format must hold back:

- blanks, which are not content if nothing follows;
- a call, until its name is complete;
- an argument that may not be a string, in formats that do not write arguments as JSON;
- the reasoning, in a format that repeats it as content if there is no other content.

If the state exceeds MAX_STATE_CHARS, the stream is refused. The complete answer can still be
derendered.

The state is sealed with a digest of the model, the formats, the request and the version of this
format. So a damaged state, or the state of another stream, is detected. The state is neither secret
nor authenticated: a client that forges a state only gets a wrong answer or an error.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import msgspec

from gateway.api.openai.stream import ChunkStreamState
from gateway.api.render.requests import MAX_STATE_CHARS
from gateway.formats.choice_parser import ChoiceParser, ParserState
from gateway.generation.request import Choice
from gateway.served_model import ServedModel
from gateway.text.detokenizer import DetokenizerState
from protocol.wire.errors import InvalidRequest

VERSION = 1
FIELD = "stream_state"
SEAL_BYTES = 16


class ChoiceState(msgspec.Struct, frozen=True, array_like=True):
    """The state of one choice of a derendered stream."""

    parser: ParserState
    #: (inside a reasoning block, number of reasoning tokens); None: they are not counted.
    reasoning: tuple[bool, int] | None
    #: The name of the last tool call.
    last_call: str
    #: The names of complete tool calls, each once.
    called: list[str]
    num_generated: int
    num_cached: int
    #: The state of the choice's `TextOffsets`, if its logprobs have text offsets.
    offsets: tuple[DetokenizerState, int] | None = None


class StreamState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a derendered stream."""

    #: The time at which the stream started.
    created: int
    #: Text to pass to `ModelOutputFormat.answer_start` instead of the prompt, which is not kept.
    ending: str
    #: Number of prompt tokens.
    prompt_tokens: int
    chunks: ChunkStreamState
    #: Index -> state of the choices that have tokens.
    choices: dict[int, ChoiceState]


_decoder = msgspec.msgpack.Decoder(StreamState)


def key_of(model: ServedModel, request: msgspec.Struct | None) -> bytes:
    """Return the key that seals a state, so that only the same model and request can open it.

    request  the chat or completion that was rendered; None if it is unknown
    """
    parts = (
        VERSION,
        model.card.digest,
        model.output_format.tools,
        model.output_format.reasoning,
        request,
    )
    return hashlib.blake2b(msgspec.json.encode(parts)).digest()


def sealed(state: StreamState, key: bytes) -> str:
    """Return the state as text. Raise InvalidRequest if the text is too long."""
    data = msgspec.msgpack.encode(state)
    text = urlsafe_b64encode(_seal(data, key) + data).decode()
    if len(text) > MAX_STATE_CHARS:
        raise InvalidRequest.at(
            "generate_chunk",
            "too much of this answer must be held back to derender it in chunks; "
            "derender the complete answer instead",
        )
    return text


def opened(text: str, key: bytes) -> StreamState:
    """Return the decoded state. Raise InvalidRequest if `text` was not made by `sealed` with this
    key."""
    try:
        data = urlsafe_b64decode(text.encode("ascii"))
        if data[:SEAL_BYTES] == _seal(data[SEAL_BYTES:], key):
            return _decoder.decode(data[SEAL_BYTES:])
    except (ValueError, RecursionError):  # not base64, or forged with the key
        pass
    raise wrong_state()


def wrong_state() -> InvalidRequest:
    return InvalidRequest.at(
        FIELD,
        "does not belong to this stream; it is damaged, or was made for another request, "
        "model or server version",
    )


def _seal(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=SEAL_BYTES).digest()


def state_of(choice: Choice, offsets: tuple[DetokenizerState, int] | None) -> ChoiceState:
    assert isinstance(choice.parser, ChoiceParser)
    counter = choice.reasoning_counter
    return ChoiceState(
        parser=choice.parser.state(),
        reasoning=(counter.inside, counter.count) if counter else None,
        last_call=choice.last_call,
        called=list(dict.fromkeys(choice.called)),
        num_generated=choice.num_generated,
        num_cached=choice.num_cached,
        offsets=offsets,
    )


def restore(choice: Choice, state: ChoiceState) -> None:
    """Set the state of a choice. A forged state may cause any exception."""
    factory: Any = choice.prompt_request.parser_factory
    choice.parser = factory.new(state.parser)
    choice.last_call, choice.called = state.last_call, list(state.called)
    choice.num_generated, choice.num_cached = state.num_generated, state.num_cached
    if state.reasoning is not None and choice.reasoning_counter is not None:
        choice.reasoning_counter.inside, choice.reasoning_counter.count = state.reasoning
