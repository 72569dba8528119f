"""What derendering a stream remembers between two chunks, as text that the client carries.

Its size does not grow with the answer: whatever is told is forgotten. It holds an unfinished
character, a possible beginning of a marker or of a stop string, where in a call the answer is, and
counts. It grows only with what a format has to hold back: blanks that are no content if nothing
follows; a call until it has a name; an argument that is no text for sure, in formats that do not
write arguments as JSON; and the reasoning of a format that repeats it as content where there is no
other. Beyond MAX_STATE_CHARS the stream is refused, rather than told wrongly; the whole answer can
still be derendered.

The text is sealed with what it is for: the model, the formats, the request, this version. So a
state that is damaged, or of another answer, is noticed. It is no secret and no proof: who forges
one gets a wrong answer of his own, or an error.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import msgspec

from gateway.api.openai.stream import ChunkStreamState
from gateway.api.render.requests import MAX_STATE_CHARS
from gateway.formats.choice_parser import ChoiceParser, ParserState
from gateway.generation.choice import Choice
from gateway.generation.reasoning_tokens import ThinkingMeter
from gateway.served_model import ServedModel
from gateway.text.detokenizer import DetokenizerState
from protocol.errors import InvalidRequest

VERSION = 1
FIELD = "stream_state"
SEAL_BYTES = 16


class ChoiceState(msgspec.Struct, frozen=True, array_like=True):
    """reader   where its tokens are read
    meter    (inside a block of reasoning, tokens counted)
    begun    the name of the last call
    called   names of complete calls, each once
    offsets  where its next token's text begins: see `TextOffsets.state`
    """

    reader: ParserState
    meter: tuple[bool, int] | None
    begun: str
    called: list[str]
    num_generated: int
    num_cached: int
    offsets: tuple[DetokenizerState, int] | None = None


class StreamState(msgspec.Struct, frozen=True, array_like=True):
    """created        when the stream began
    ending         for `Reading.begin`, in the place of the prompt
    prompt_tokens  how many
    choices        those that have said anything
    """

    created: int
    ending: str
    prompt_tokens: int
    told: ChunkStreamState
    choices: dict[int, ChoiceState]


_decoder = msgspec.msgpack.Decoder(StreamState)


def key_of(model: ServedModel, request: msgspec.Struct | None) -> bytes:
    """Return the key that seals a state. `request`: the rendered one, of its API; None: unknown."""
    parts = (VERSION, model.card.digest, model.reading.tools, model.reading.reasoning, request)
    return hashlib.blake2b(msgspec.json.encode(parts)).digest()


def sealed(state: StreamState, key: bytes) -> str:
    """Raises InvalidRequest where too much is held back."""
    data = msgspec.msgpack.encode(state)
    text = urlsafe_b64encode(_seal(data, key) + data).decode()
    if len(text) > MAX_STATE_CHARS:
        raise InvalidRequest(
            "generate_chunk: too much of this answer must be held back to derender it in chunks; "
            "derender the complete answer instead",
            param="generate_chunk",
        )
    return text


def opened(text: str, key: bytes) -> StreamState:
    """Raises InvalidRequest for anything that `sealed` has not made with this key."""
    try:
        data = urlsafe_b64decode(text.encode("ascii"))
        if data[:SEAL_BYTES] == _seal(data[SEAL_BYTES:], key):
            return _decoder.decode(data[SEAL_BYTES:])
    except (ValueError, RecursionError):  # no base64; or sealed by someone who knows the key
        pass
    raise wrong_state()


def wrong_state() -> InvalidRequest:
    return InvalidRequest(
        f"{FIELD}: does not belong to this stream; it is damaged, or was made for another request, "
        "model or server version",
        param=FIELD,
    )


def _seal(data: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=SEAL_BYTES).digest()


def state_of(choice: Choice, offsets: tuple[DetokenizerState, int] | None) -> ChoiceState:
    assert isinstance(choice.reader, ChoiceParser)
    meter = choice.meter
    return ChoiceState(
        reader=choice.reader.state(),
        meter=(meter.inside, meter.count) if meter else None,
        begun=choice.begun,
        called=list(dict.fromkeys(choice.called)),
        num_generated=choice.num_generated,
        num_cached=choice.num_cached,
        offsets=offsets,
    )


def restore(choice: Choice, state: ChoiceState) -> None:
    """Of a state that was forged, any exception may come."""
    readers: Any = choice.ask.readers
    choice.reader = readers.new(state.reader)
    choice.begun, choice.called = state.begun, list(state.called)
    choice.num_generated, choice.num_cached = state.num_generated, state.num_cached
    if state.meter is not None and isinstance(choice.meter, ThinkingMeter):
        choice.meter.inside, choice.meter.count = state.meter
