"""Counts calls of our own functions per token or step, in scripted runs.

Unlike times, counts do not depend on the machine and its load, so tests/unit/test_work.py compares
them with recorded ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gateway.api.openai.response_builder import ChatResponseBuilder, OpenAIEnvelope
from gateway.api.openai.stream import ChunkStream
from gateway.engine.client import ZmqEngineClient
from gateway.engine.coalesce import coalesce
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.registry import bind, format_of
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import PromptRequest
from gateway.text.tokenizer import Tokenizer
from protocol.engine.messages import Output, Outputs
from protocol.engine.sampling import SamplingParams
from tests.support.answers import WrittenStream
from tests.support.calls import watched_calls
from tests.support.engines import Bench
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.scripted_engine import ids_of, marked_ids, scripted_card, thinking_card
from tests.support.tiny_model import tiny_cache, tiny_runner, tiny_slots

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "work.json"
ROOMS = tuple(f"{ROOT}/{room}/" for room in ("protocol", "gateway", "engine_core", "worker"))
ALLOWED = 1.05
"""Maximum number of calls, relative to the recorded number. It allows less than one more call per
token of a plain stream."""

Work = dict[str, float]
"""Function ("file:name") -> how often it is called per unit."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scripted run.

    run   does the work, and returns its number of units
    """

    name: str
    unit: str
    run: Callable[[CountedWork], int]

    def work(self) -> Work:
        """Return the calls of each function per unit, in a second run. The first run warms up."""
        self.run(CountedWork())
        counted = CountedWork()
        units = self.run(counted)
        return {name: count / units for name, count in sorted(counted.calls.items())}


class CountedWork:
    """Counts calls of functions in ROOMS inside `with counted():`, in this thread."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self) -> AbstractContextManager[None]:
        return watched_calls(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS):
            file = code.co_filename.removeprefix(f"{ROOT}/")
            self.calls[f"{file}:{code.co_qualname}"] += 1


# ---- gateway

PLAIN = "The quick brown fox jumps over the lazy dog. " * 8
THINKING = (
    "<think>\nFirst I look at the question, then I answer it.\n</think>\n\nOne moment, please."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2, 3]}}'
    "\n</tool_call>"
)


def stream(
    ids: Sequence[int],
    readers: ParserFactory,
    counted: CountedWork,
    *,
    is_late: bool = False,
    is_slow: bool = False,
) -> int:
    """Turn the engine's outputs for a chat, one token per step, into the frames of its stream.

    Return the number of tokens.

    is_late   all outputs arrive before the first is processed
    is_slow   the client reads only after all outputs
    """
    answer = ChoiceGroup(
        ZmqEngineClient("ipc:///nowhere"), [PromptRequest([1, 2, 3], [SamplingParams()], readers)]
    )
    (choice,) = answer.choices
    written = WrittenStream()
    sink = ChunkStream(
        answer,
        written,
        ChatResponseBuilder(readers.tokenizer, None),
        OpenAIEnvelope("chatcmpl-1", "m", "print", created=12),
    )
    answer.attach(sink)
    steps = [
        Outputs(step=step, outputs=[Output(request=1, tokens=[token])])
        for step, token in enumerate(ids)
    ]
    with counted():
        if is_slow:
            answer.detach()
        for step in coalesce(steps) if is_late else steps:
            for output in step.outputs:
                answer.on_report(choice, output)
        if is_slow:
            answer.attach(sink)
    answer.close()
    assert written.data
    assert is_late or is_slow or written.num_writes > len(ids) / 4
    return len(ids)


def plain_stream(counted: CountedWork) -> int:
    return stream(ids_of(PLAIN), ParserFactory(Tokenizer(scripted_card())), counted)


def late_stream(counted: CountedWork) -> int:
    return stream(ids_of(PLAIN), ParserFactory(Tokenizer(scripted_card())), counted, is_late=True)


def slow_stream(counted: CountedWork) -> int:
    return stream(ids_of(PLAIN), ParserFactory(Tokenizer(scripted_card())), counted, is_slow=True)


def formatted_stream(counted: CountedWork) -> int:
    tokenizer = Tokenizer(thinking_card())
    bound = bind(format_of("hermes", "qwen3"), tokenizer)
    options = AnswerOptions(format=bound, new_id=lambda: "call_1")
    return stream(marked_ids(THINKING), ParserFactory(tokenizer, None, options), counted)


# ---- engine

STREAMS, ANSWER, PROMPT = 8, 40, 24


def engine_answers(counted: CountedWork, **config: Any) -> int:
    """Plan and commit the steps of several streams at once. Return the number of tokens."""
    bench = Bench(num_blocks=257, sample=_never_ends, **config)
    for number in range(STREAMS):
        prompt = [1 + (number + at) % 90 for at in range(PROMPT)]
        bench.add(prompt, max_tokens=ANSWER, temperature=0.0)
    tokens = 0
    while True:
        with counted():
            plan = bench.engine.plan()
            bench.engine.drain_kv_commands()
        if plan is None:
            break
        result = bench.worker.execute(plan)
        with counted():
            sent = bench.engine.commit(result, 0.01)
        tokens += sum(len(o.tokens) for outputs in sent.values() for o in outputs.outputs)
    assert tokens == STREAMS * ANSWER
    return tokens


def _never_ends(tokens: list[int], seed: int, possible: list[int] | None) -> int:
    return 1 + (tokens[-1] + 1) % 90


def guessed_answers(counted: CountedWork) -> int:
    return engine_answers(counted, speculation="ngram")


# ---- worker

ROWS, STEPS = 4, 12
WORDS = [5, 9, 2, 77, 31]


def worker_steps(params: SamplingParams, counted: CountedWork) -> int:
    """Execute decoding steps of a few rows. Return the number of steps."""
    runner = tiny_runner(tiny_slots(ROWS), tiny_cache(ROWS * 8 + 1))
    blocks = [list(range(1 + row * 6, 7 + row * 6)) for row in range(ROWS)]
    inits = [slot_init(row, WORDS, blocks=blocks[row], params=params) for row in range(ROWS)]
    rows = [(row, 0, len(WORDS), True) for row in range(ROWS)]
    runner.step(step_plan(0, bind=inits, rows=rows))
    for step in range(1, STEPS + 1):
        start = len(WORDS) + step - 1
        plan = step_plan(step, rows=[(row, start, 1, True) for row in range(ROWS)])
        with counted():
            runner.step(plan)
    return STEPS


def greedy_steps(counted: CountedWork) -> int:
    return worker_steps(GREEDY, counted)


def drawn_steps(counted: CountedWork) -> int:
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1, logprobs=2)
    return worker_steps(drawn, counted)


SCENARIOS = [
    Scenario("gateway, a chat's stream", "token", plain_stream),
    Scenario("gateway, behind its engine", "token", late_stream),
    Scenario("gateway, before a slow client", "token", slow_stream),
    Scenario("gateway, reasoning and tool calls", "token", formatted_stream),
    Scenario("engine, 8 streams", "token", engine_answers),
    Scenario("engine, 8 streams with guesses", "token", guessed_answers),
    Scenario("worker, 4 greedy rows", "step", greedy_steps),
    Scenario("worker, 4 rows that draw", "step", drawn_steps),
]


# ---- comparison with recorded counts


def complaint(scenario: Scenario, recorded: Work, now: Work) -> str | None:
    """Return an error message with the functions that are called more often than recorded; None if
    the total number of calls has not grown beyond ALLOWED."""
    before, total = sum(recorded.values()), sum(now.values())
    if total <= before * ALLOWED:
        return None
    grown = {name: count - recorded.get(name, 0.0) for name, count in now.items()}
    worst = sorted((name for name in grown if grown[name] > 0), key=lambda name: -grown[name])
    rows = [f"  {recorded.get(name, 0.0):8.2f} -> {now[name]:8.2f}  {name}" for name in worst[:15]]
    return "\n".join(
        [
            f"{scenario.name}: {total:.1f} calls per {scenario.unit}; {before:.1f} were recorded. "
            "These functions are called more often:",
            *rows,
            "If that is intended, record the new counts with `python -m tests.unit.test_work`, and "
            "give the reason in the commit.",
        ]
    )


def record() -> None:
    counts = {s.name: {k: round(v, 4) for k, v in s.work().items()} for s in SCENARIOS}
    RECORDED.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    for scenario in SCENARIOS:
        total = sum(counts[scenario.name].values())
        print(f"{total:8.1f} calls per {scenario.unit}  {scenario.name}")
