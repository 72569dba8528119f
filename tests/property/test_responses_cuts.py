"""Any cut of the engine's outputs gives the same response, and the response equals the fold of its
stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.responses.events import ResponseEvents
from gateway.api.responses.stream import ResponseSink, TextLogprobs
from gateway.engine.base import Subscriber
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.model_format import ModelOutputFormat
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.text.tokenizer import Tokenizer
from protocol.engine.messages import Accepted, Output
from protocol.engine.sampling import SamplingParams
from tests.support.responses import CollectedFrames, a_queued_response, items_of, typed_events
from tests.support.scripted_engine import EOS, marked_ids, scripted_logprob, thinking_card

CARD = thinking_card()
TOKENIZER = Tokenizer(CARD)
READING = ModelOutputFormat(CARD, TOKENIZER)
QUEUED = a_queued_response("resp_" + "0" * 32)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
ANSWERS = [
    "Plain text with 🙂 in it.",
    "<think>\nhm, é\n</think>\n\nYes.",
    f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}",
    f"{CALL}",
    "<think>\nno end",
    '<tool_call>\n{"name": "f", "arguments": {"a": ',
    "<tool_call>\nno call\n</tool_call> after all",
]


class CutLine:
    """An engine client that accepts a request. The test sends the outputs by calling `say`."""

    def generate(self, prompt: Any, params: Any, subscriber: Subscriber, **terms: Any) -> int:
        self.say = subscriber
        subscriber(Accepted(request=1))
        return 1

    def encode(self, *_: Any, **__: Any) -> int:
        raise AssertionError("no request here encodes")

    def abort(self, request: int, reason: str, *, on_freed: object = None) -> None:
        pass


def told(text: str, sizes: list[int], finish: str, pauses: Iterable[bool] = ()) -> CollectedFrames:
    """Return the response to `text`.

    sizes   sizes of the messages in which its tokens arrive; the remaining tokens arrive in one
    pauses  for each message, whether the client was disconnected while it arrived
    """
    begun = READING.answer_start("<assistant>", {}, calls=True)
    assert begun.bound is not None
    numbers = iter(range(100))
    options = AnswerOptions(format=begun.bound, new_id=lambda: f"call_{next(numbers)}")
    asks = [PromptRequest([1], [SamplingParams()], ParserFactory(TOKENIZER, answer=options))]
    line, taken = CutLine(), CollectedFrames()
    answer = ChoiceGroup(line, asks)
    answer.open()
    events = ResponseEvents(QUEUED)
    sink = ResponseSink(answer, events, taken, TextLogprobs(TOKENIZER, 1))
    answer.attach(sink)
    is_paused = iter(pauses)
    ids = [*marked_ids(text), *([EOS] if finish == "stop" else [])]
    while ids:
        size = sizes.pop(0) if sizes else len(ids)
        piece, ids = ids[:size], ids[size:]
        ends: dict[str, Any] = {"finish": finish} if not ids else {}
        if ends and finish == "stop":
            ends["stop_token"] = EOS
        logprobs = [scripted_logprob(token, 1) for token in piece]
        if next(is_paused, False):
            answer.detach()
        else:
            answer.attach(sink)
        line.say(Output(request=1, tokens=piece, logprobs=logprobs, **ends))
    answer.attach(sink)
    return taken


@given(
    st.sampled_from(ANSWERS),
    st.lists(st.integers(1, 9), max_size=60),
    st.sampled_from(["stop", "length"]),
    st.lists(st.booleans(), max_size=60),
)
def test_any_cut_gives_the_same_response(
    text: str, sizes: list[int], finish: str, pauses: list[bool]
) -> None:
    cut = told(text, sizes, finish, pauses)
    by_token = told(text, [1] * 500, finish)
    assert comparable(cut.whole) == comparable(by_token.whole)
    for taken in (cut, by_token):
        events = typed_events(taken.data)
        assert events[-1]["response"] == taken.whole
        assert items_of(events) == taken.whole["output"]


@given(
    st.sampled_from(ANSWERS[:3]),
    st.lists(st.integers(1, 9), max_size=60),
    st.lists(st.booleans(), max_size=60),
)
def test_logprobs_of_a_text_are_those_of_its_tokens_however_they_came(
    text: str, sizes: list[int], pauses: list[bool]
) -> None:
    output = told(text, sizes, "stop", pauses).whole["output"]
    (part,) = [part for item in output if item["type"] == "message" for part in item["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]) == part["text"].encode()


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Return the response without its completion time and its logprobs. If markup is emitted as
    text, its pieces are not whole tokens, so the logprobs of each piece depend on the cut.
    """
    copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(response))
    for item in copy["output"]:
        for part in item.get("content", ()):
            part.pop("logprobs", None)
    return copy | {"completed_at": None}
