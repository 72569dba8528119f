"""The comparison of two models or two settings, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, scripted_card, text_reply


@pytest.fixture(scope="module")
def two_models(
    engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """Yield a gateway of two models."""
    address = f"ipc://{tmp_path_factory.mktemp('second') / 'engine.sock'}"
    with ScriptedEngine(address, card=scripted_card(name="second"), max_len=4096) as second:
        second.script = lambda generate: text_reply("Hello, you!")
        models = [
            {"served_name": ["alpha"], "engine": engine.address},
            {"served_name": ["beta"], "engine": second.address},
        ]
        with GatewayProcess(models=models, log_requests=False) as gateway:
            yield gateway.await_ready()


def test_two_settings_are_compared_with_the_same_seed(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    def script(generate: Any) -> Any:
        return text_reply("One, two!" if generate.params.temperature < 1 else "One, six!")

    engine.script = script
    page = visit().open("/#compare")
    page.get_by_text("Both sides have the same model and settings.").wait_for()
    side = page.get_by_role("region", name="B", exact=True)
    side.locator("summary").first.click()
    side.get_by_label("Temperature").fill("1.5")
    page.get_by_label("Seed").fill("42")
    page.get_by_label("Prompt").fill("Count.")
    page.get_by_label("Prompt").press("Enter")
    page.locator(
        ".verdict",
        has_text="differ from character 6 (token 6) on: 1 of 2 words of A, 1 of 2 of B.",
    ).wait_for()
    outputs = page.locator(".output")
    assert outputs.all_inner_texts() == ["One, two!", "One, six!"]
    assert page.locator(".differs").all_inner_texts() == ["two", "six"]
    requests = engine.generates[-2:]
    assert {request.params.seed for request in requests} == {42}
    assert sorted(request.params.temperature for request in requests) == [0.7, 1.5]
    rows = dict(row.split("\t", 1) for row in page.locator(".facts-table").inner_text().split("\n"))
    assert rows["temperature"] == "default\t1.5"
    assert rows["Tokens"] == "10\t10"
    assert rows["End"] == "stop\tstop"


def test_a_difference_in_the_middle_leaves_the_rest_unmarked(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    first, second = (
        "The sea rises twice a day, and falls.",
        "The sea rises and sinks a day, 和 falls.",
    )
    engine.script = lambda generate: text_reply(first if generate.params.top_k == 1 else second)
    page = visit().open("/#compare")
    side = page.get_by_role("region", name="A", exact=True)
    side.locator("summary").first.click()
    side.get_by_label("Top k").fill("1")
    page.get_by_label("Prompt").fill("What is a tide?")
    page.keyboard.press("Control+Enter")
    page.locator(".verdict", has_text="2 of 8 words of A, 3 of 9 of B.").wait_for()
    outputs = page.locator(".output")
    assert outputs.all_inner_texts() == [first, second]
    marks = [outputs.nth(side).locator(".differs").all_inner_texts() for side in (0, 1)]
    assert [[text.strip() for text in own] for own in marks] == [
        ["twice", "and"],
        ["and", "sinks", "和"],
    ]


def test_the_columns_of_the_table_stay_where_they_are(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    engine.script = lambda generate: text_reply("word " * 20)
    page = visit().open("/#compare")
    page.get_by_text("Both sides have the same model and settings.").wait_for()
    heads = "[...document.querySelectorAll('.facts-table thead th')].map(each => each.offsetLeft)"
    before, rows = page.evaluate(heads), page.locator(".facts-table tbody tr").count()
    page.get_by_label("Prompt").fill("hi")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".verdict", has_text="The answers are identical.").wait_for()
    assert page.evaluate(heads) == before
    assert page.locator(".facts-table tbody tr").count() == rows
    assert "Tokens\t101\t101" in page.locator(".facts-table").inner_text()


DIFF = """async (pairs) => {
  const { diff } = await import("/web/diff.js");
  return pairs.map(([a, b, most]) => diff(a, b, most));
}"""


def num_shared(a: list[str], b: list[str]) -> int:
    """Return the length of the longest list that is a part of both, by trying all."""
    longest = [0] * (len(b) + 1)
    for item in a:
        row = [0]
        for place, other in enumerate(b):
            row.append(longest[place] + 1 if item == other else max(row[place], longest[place + 1]))
        longest = row
    return longest[-1]


def test_a_diff_is_the_shortest_one(visit: Visitor) -> None:
    draw = Random(1)
    lists = [draw.choices("ab ", k=draw.randrange(12)) for _ in range(600)]
    pairs = [(a, b, 500) for a, b in zip(lists[::2], lists[1::2], strict=True)]
    page = visit().open("/#compare")
    for (a, b, _), runs in zip(pairs, page.evaluate(DIFF, pairs), strict=True):
        at, to, same = 0, 0, 0
        for is_same, num_a, num_b in runs:
            assert not is_same or a[at : at + num_a] == b[to : to + num_b]
            same += num_a if is_same else 0
            at, to = at + num_a, to + num_b
        assert (at, to, same) == (len(a), len(b), num_shared(a, b))


def test_texts_with_little_in_common_are_one_difference(visit: Visitor) -> None:
    a, b = [str(number) for number in range(1000)], [str(-number) for number in range(1, 1000)]
    page = visit().open("/#compare")
    [runs] = page.evaluate(DIFF, [[["x", *a, "y"], ["x", *b, "y"], 50]])
    assert runs == [[True, 1, 1], [False, 1000, 999], [True, 1, 1]]


def test_equal_settings_give_identical_answers(visit: Visitor) -> None:
    page = visit().open("/#compare")
    page.get_by_label("Prompt").fill("hi")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".verdict", has_text="The answers are identical.").wait_for()


@pytest.mark.parametrize("slow", ["/v1/models", "/openapi.json"])
def test_a_visitor_may_compare_before_the_models_are_known(visit: Visitor, slow: str) -> None:
    visitor = visit()
    release = visitor.hold(slow)
    page = visitor.open("/#compare")
    page.get_by_label("Prompt").fill("hi")
    page.get_by_role("button", name="Compare", exact=True).click()
    release()
    page.locator(".verdict", has_text="The answers are identical.").wait_for()


def test_two_models_are_compared(visit: Visitor, two_models: GatewayProcess) -> None:
    page = visit(two_models.url).open("/#compare")
    page.get_by_label("Model of B").wait_for()
    page.get_by_label("Model of B").locator("option[value=beta]:checked").wait_for(state="attached")
    page.get_by_label("Prompt").fill("hi")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".verdict", has_text="The answers differ from character 8 on:").wait_for()
    assert page.locator(".output").all_inner_texts() == ["Hello, world!", "Hello, you!"]
    assert "Model\talpha\tbeta" in page.locator(".facts-table").inner_text()


def test_both_answers_can_be_stopped(visit: Visitor, engine: ScriptedEngine) -> None:
    engine.script = lambda generate: text_reply("word " * 500)
    engine.step_s = 0.02
    page = visit().open("/#compare")
    page.get_by_label("Prompt").fill("hi")
    page.get_by_label("Prompt").press("Enter")
    page.locator(".output").last.get_by_text("word").wait_for()
    page.get_by_role("button", name="Stop").click()
    for request in engine.generates[-2:]:
        engine.await_abort(request.request)
    page.get_by_role("button", name="Compare", exact=True).wait_for()
