"""Outputs that arrive faster than they are processed are merged per request, without loss."""

from __future__ import annotations

import random

import pytest

from gateway.engine.coalesce import MAX_PIECES, coalesce, merge_steps
from gateway.formats.choice_parser import AnswerOptions, ParserFactory, ReadOptions
from gateway.formats.events import Event, merged
from gateway.formats.registry import bind, format_of
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output, Outputs, Usage
from protocol.wire.errors import ErrorInfo
from tests.support.scripted_engine import marked_ids, thinking_card

TEXT = (
    "<think>\nHow? — Thus.\n</think>\n\nOne moment."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)


def a_logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -token / 8, 1)


def steps_of(*outputs: Output) -> list[Outputs]:
    """Return one step for each output."""
    return [Outputs(step=step, outputs=[output]) for step, output in enumerate(outputs)]


def token_by_token(request: int, tokens: list[int]) -> list[Output]:
    """Return the engine's outputs, one token each. The first and the last have a usage."""
    outputs = []
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
        outputs.append(output)
    return outputs


def test_all_outputs_of_one_request_become_one() -> None:
    (output,) = merge_steps(steps_of(*token_by_token(7, [10, 11, 12]))).outputs
    assert output == Output(
        request=7,
        tokens=[10, 11, 12],
        logprobs=[a_logprob(token) for token in (10, 11, 12)],
        prompt_logprobs=[a_logprob(1), a_logprob(2)],
        finish="stop",
        stop_token=12,
        usage=Usage(prompt_tokens=3, generated_tokens=3),
    )


def test_a_failure_is_merged_with_the_tokens_before_it() -> None:
    error = ErrorInfo(code="engine_error", message="a step failed")
    outputs = Output(request=1, tokens=[5])
    failed = Output(request=1, finish="error", error=error)
    (output,) = merge_steps(steps_of(outputs, failed)).outputs
    assert output == Output(request=1, tokens=[5], finish="error", error=error)


def test_requests_are_in_the_order_of_their_first_outputs() -> None:
    whole = merge_steps(steps_of(*(Output(request=n, tokens=[n]) for n in (3, 1, 3, 2, 1))))
    assert [(output.request, output.tokens) for output in whole.outputs] == [
        (3, [3, 3]),
        (1, [1, 1]),
        (2, [2]),
    ]


def test_only_more_than_max_pieces_are_merged() -> None:
    steps = steps_of(*(Output(request=n % 2, tokens=[n]) for n in range(MAX_PIECES + 1)))
    assert coalesce(steps[:-1]) == steps[:-1]
    assert coalesce(steps) == [merge_steps(steps)]
    assert len(coalesce(steps)[0].outputs) == 2


@pytest.mark.parametrize("seed", range(20))
def test_merged_outputs_give_the_same_events(seed: int) -> None:
    """The outputs of three answers interleave, and are merged at random moments."""
    chance = random.Random(seed)
    tokenizer = Tokenizer(thinking_card())
    options = AnswerOptions(
        format=bind(format_of("hermes", "qwen3"), tokenizer), new_id=lambda: "call_1"
    )
    factory = ParserFactory(tokenizer, ReadOptions(stop=["absent"]), options)
    answers = [token_by_token(n, marked_ids(TEXT)) for n in range(3)]
    plain, late = [_read(factory, mixed(answers, chance, merges)) for merges in (False, True)]
    assert plain == late
    assert all(len(events) > 5 for events in plain.values())


def mixed(answers: list[list[Output]], chance: random.Random, merges: bool) -> list[Output]:
    """Return the outputs of all answers in a random order that keeps the order of each answer. If
    `merges`, batches of random sizes are merged."""
    left = [list(answer) for answer in answers]
    all_: list[Output] = []
    while some := [answer for answer in left if answer]:
        batch = [chance.choice(some).pop(0)]
        for _ in range(chance.randrange(90)):
            if some := [answer for answer in left if answer]:
                batch.append(chance.choice(some).pop(0))
        all_ += merge_steps(steps_of(*batch)).outputs if merges else batch
    return all_


def _read(factory: ParserFactory, outputs: list[Output]) -> dict[int, list[Event]]:
    readers = {request: factory.new() for request in range(3)}
    events: dict[int, list[Event]] = {request: [] for request in range(3)}
    for output in outputs:
        events[output.request] += readers[output.request].push(output).events
    return {request: merged(events) for request, events in events.items()}
