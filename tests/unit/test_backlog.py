"""News that came faster than it could be told: joined per request, and nothing is lost by it."""

from __future__ import annotations

import random

import pytest

from gateway.engine.coalesce import MAX_PIECES, coalesce, merge_steps
from gateway.formats.choice_parser import AnswerOptions, ParserFactory, ReadOptions
from gateway.formats.events import Event, merged
from gateway.formats.registry import bind, format_of
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ErrorInfo
from protocol.messages import Output, Outputs, TokenLogprobs, Usage
from tests.support.scripted_engine import marked_ids, thinking_card

SAID = (
    "<think>\nHow? — Thus.\n</think>\n\nOne moment."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)


def a_logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -token / 8, 1)


def steps_of(*outputs: Output) -> list[Outputs]:
    """One for each."""
    return [Outputs(step=step, outputs=[output]) for step, output in enumerate(outputs)]


def told_token_by_token(request: int, tokens: list[int]) -> list[Output]:
    """As the engine says it: usage with the first and the last."""
    said = []
    for place, token in enumerate(tokens):
        is_last = place == len(tokens) - 1
        usage = Usage(prompt_tokens=3, generated_tokens=place + 1)
        output = Output(
            request=request,
            tokens=[token],
            logprobs=[a_logprob(token)],
            prompt_logprobs=[] if place else [a_logprob(1), a_logprob(2)],
            finish="stop" if is_last else None,
            stop_token=token if is_last else None,
            usage=usage if is_last or not place else None,
        )
        said.append(output)
    return said


def test_all_that_waits_for_one_request_is_one_piece() -> None:
    (output,) = merge_steps(steps_of(*told_token_by_token(7, [10, 11, 12]))).outputs
    assert output == Output(
        request=7,
        tokens=[10, 11, 12],
        logprobs=[a_logprob(token) for token in (10, 11, 12)],
        prompt_logprobs=[a_logprob(1), a_logprob(2)],
        finish="stop",
        stop_token=12,
        usage=Usage(prompt_tokens=3, generated_tokens=3),
    )


def test_a_failure_comes_with_what_was_said_before_it() -> None:
    error = ErrorInfo(code="engine_error", message="a step failed")
    said = Output(request=1, tokens=[5])
    failed = Output(request=1, finish="error", error=error)
    (output,) = merge_steps(steps_of(said, failed)).outputs
    assert output == Output(request=1, tokens=[5], finish="error", error=error)


def test_requests_come_in_the_order_in_which_they_were_first_heard_of() -> None:
    whole = merge_steps(steps_of(*(Output(request=n, tokens=[n]) for n in (3, 1, 3, 2, 1))))
    assert [(output.request, output.tokens) for output in whole.outputs] == [
        (3, [3, 3]),
        (1, [1, 1]),
        (2, [2]),
    ]


def test_a_little_is_told_as_it_came_and_much_is_joined() -> None:
    steps = steps_of(*(Output(request=n % 2, tokens=[n]) for n in range(MAX_PIECES + 1)))
    assert coalesce(steps[:-1]) == steps[:-1]
    assert coalesce(steps) == [merge_steps(steps)]
    assert len(coalesce(steps)[0].outputs) == 2


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_of_joined_news_is_what_is_read_piece_by_piece(seed: int) -> None:
    """Three answers whose news interleave, joined at random moments: the same events, merged."""
    chance = random.Random(seed)
    tokenizer = Tokenizer(thinking_card())
    options = AnswerOptions(
        format=bind(format_of("hermes", "qwen3"), tokenizer), new_id=lambda: "call_1"
    )
    factory = ParserFactory(tokenizer, ReadOptions(stop=["never said"]), options)
    answers = [told_token_by_token(n, marked_ids(SAID)) for n in range(3)]
    plain, late = [_read(factory, told(answers, chance, joins)) for joins in (False, True)]
    assert plain == late
    assert all(len(events) > 5 for events in plain.values())


def told(answers: list[list[Output]], chance: random.Random, joins: bool) -> list[Output]:
    """All answers' news, in any order that keeps each one's own."""
    left = [list(answer) for answer in answers]
    all_: list[Output] = []
    while some := [answer for answer in left if answer]:
        batch = [chance.choice(some).pop(0)]
        for _ in range(chance.randrange(90)):
            if some := [answer for answer in left if answer]:
                batch.append(chance.choice(some).pop(0))
        all_ += merge_steps(steps_of(*batch)).outputs if joins else batch
    return all_


def _read(factory: ParserFactory, outputs: list[Output]) -> dict[int, list[Event]]:
    readers = {request: factory.new() for request in range(3)}
    heard: dict[int, list[Event]] = {request: [] for request in range(3)}
    for output in outputs:
        heard[output.request] += readers[output.request].push(output).events
    return {request: merged(events) for request, events in heard.items()}
