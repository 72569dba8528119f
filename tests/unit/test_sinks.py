"""Who hears an answer, and what a choice counts of what it is told."""

from __future__ import annotations

from gateway.asking import NOT_CALLED, Ask, Demand
from gateway.choice import Choice
from gateway.output.events import Content, Delta, Finished, ToolCall, ToolCallEnd, Warning
from gateway.output.tokens import TokenReaders
from gateway.sinks import Fold
from protocol.messages import Output, Usage
from protocol.sampling import SamplingParams

HELLO, WORLD = Delta([Content("hello")], [1]), Delta([Content("world")], [2])
END = Finished("stop", None)


def a_choice(index: int = 0) -> Choice:
    params = SamplingParams(seed=1)
    ask = Ask([1, 2, 3], [params], TokenReaders([2]))
    return Choice(index, 0, ask, params, ask.readers.new())


def test_a_whole_answer_joins_the_deltas_of_each_choice() -> None:
    fold = Fold(2)
    for choice, delta in ((0, HELLO), (1, WORLD), (0, WORLD)):
        fold.delta(a_choice(choice), delta)
    assert fold.whole == [
        Delta([Content("hello"), Content("world")], [1, 2]),
        Delta([Content("world")], [2]),
    ]


def test_tokens_behind_the_end_and_what_was_fetched_are_not_counted() -> None:
    choice = a_choice()
    usage = Usage(prompt_tokens=9, generated_tokens=3, cached_tokens=8, fetched_tokens=6)
    choice.count(Output(request=0, tokens=[5, 6, 7], usage=usage), 1)
    choice.count(Output(request=0, tokens=[8]), 0)
    assert (choice.num_generated, choice.num_cached, choice.usage) == (3, 2, usage)


def judged(demand: Demand, *names: str) -> list[str]:
    """Codes of the warnings before the end of an answer that has called these tools."""
    choice = a_choice()
    for index, name in enumerate(names):
        choice.judge(demand, Delta([ToolCall(index, "id", name)]))
        choice.judge(demand, Delta([ToolCallEnd(index)]))
    last = Delta([END])
    choice.judge(demand, last)
    assert last.events[-1] == END
    return [event.code for event in last.events if isinstance(event, Warning)]


def test_an_answer_that_does_not_call_what_was_demanded_is_told_with_a_warning() -> None:
    assert judged(Demand()) == [NOT_CALLED]
    assert judged(Demand(), "any") == []
    assert judged(Demand("one"), "one", "one") == []
    assert judged(Demand("one"), "one", "other") == [NOT_CALLED]


def test_an_answer_that_was_cut_off_is_told_without() -> None:
    cut = Delta([Finished("length", None)])
    a_choice().judge(Demand(), cut)
    assert len(cut.events) == 1
