"""The sinks of an answer, and the counters of a choice."""

from __future__ import annotations

from gateway.formats.choice_parser import TokenPassthroughFactory
from gateway.formats.events import (
    Content,
    Finished,
    OutputDelta,
    OutputWarning,
    ToolCall,
    ToolCallEnd,
)
from gateway.generation.request import NOT_CALLED, Choice, PromptRequest, ToolChoiceCheck
from gateway.generation.sinks import CollectSink
from protocol.engine.messages import Output, Usage
from protocol.engine.sampling import SamplingParams

HELLO, WORLD = OutputDelta([Content("hello")], [1]), OutputDelta([Content("world")], [2])
END = Finished("stop", None)


def a_choice(index: int = 0) -> Choice:
    params = SamplingParams(seed=1)
    ask = PromptRequest([1, 2, 3], [params], TokenPassthroughFactory([2]))
    return Choice(index, 0, ask, params, ask.parser_factory.new())


def test_a_whole_answer_joins_the_deltas_of_each_choice() -> None:
    fold = CollectSink(2)
    for choice, delta in ((0, HELLO), (1, WORLD), (0, WORLD)):
        fold.delta(a_choice(choice), delta)
    assert fold.whole == [
        OutputDelta([Content("hello"), Content("world")], [1, 2]),
        OutputDelta([Content("world")], [2]),
    ]


def test_later_tokens_and_fetched_tokens_are_not_counted() -> None:
    choice = a_choice()
    usage = Usage(prompt_tokens=9, generated_tokens=3, cached_tokens=8, fetched_tokens=6)
    choice.count(Output(request=0, tokens=[5, 6, 7], usage=usage), 1)
    choice.count(Output(request=0, tokens=[8]), 0)
    assert (choice.num_generated, choice.num_cached, choice.usage) == (3, 2, usage)


def judged(demand: ToolChoiceCheck, *names: str) -> list[str]:
    """Return the codes of the warnings at the end of an answer that has called these tools."""
    choice = a_choice()
    for index, name in enumerate(names):
        choice.warn_if_unmet(demand, OutputDelta([ToolCall(index, "id", name)]))
        choice.warn_if_unmet(demand, OutputDelta([ToolCallEnd(index)]))
    last = OutputDelta([END])
    choice.warn_if_unmet(demand, last)
    assert last.events[-1] == END
    return [event.code for event in last.events if isinstance(event, OutputWarning)]


def test_an_answer_without_the_required_call_has_a_warning() -> None:
    assert judged(ToolChoiceCheck()) == [NOT_CALLED]
    assert judged(ToolChoiceCheck(), "any") == []
    assert judged(ToolChoiceCheck("one"), "one", "one") == []
    assert judged(ToolChoiceCheck("one"), "one", "other") == [NOT_CALLED]


def test_a_truncated_answer_has_no_warning() -> None:
    cut = OutputDelta([Finished("length", None)])
    a_choice().warn_if_unmet(ToolChoiceCheck(), cut)
    assert len(cut.events) == 1
