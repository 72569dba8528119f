"""The settings of the web page in a browser: nothing that was typed is dropped without a word."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from gateway.app import encoded_document
from tests.integration.page.conftest import Visitor
from tests.support.browser import await_answer, send
from tests.support.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

CHAT_FIELDS = json.loads(encoded_document())["components"]["schemas"]["ChatBody"]["properties"]
LABELS = {
    "temperature": "Temperature",
    "top_p": "Top p",
    "top_k": "Top k",
    "min_p": "Min p",
    "frequency_penalty": "Frequency penalty",
    "presence_penalty": "Presence penalty",
    "repetition_penalty": "Repetition penalty",
    "max_tokens": "Max tokens",
    "seed": "Seed",
}
RARE_LABELS = {
    "typical_p": "Typical p",
    "top_n_sigma": "Top n sigma",
    "dynatemp_range": "Dynatemp range",
    "dynatemp_exponent": "Dynatemp exponent",
    "xtc_probability": "XTC probability",
    "xtc_threshold": "XTC threshold",
    "dry_multiplier": "DRY multiplier",
    "dry_base": "DRY base",
    "dry_allowed_length": "DRY allowed length",
    "dry_penalty_last_n": "DRY last tokens",
}
"""The fields that are shown only in "More samplers"."""
LARGEST_EXACT = 2**53 - 1
"""The largest whole number up to which JavaScript has each one."""
BORDER = "element => getComputedStyle(element).borderTopColor"


def bounds_of(name: str) -> tuple[float, float, bool]:
    """Return the lowest and the highest value of a field, and whether it is a whole number."""
    schema = CHAT_FIELDS[name]["anyOf"][0]
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    is_whole = schema["type"] == "integer"
    edge = LARGEST_EXACT if is_whole else math.inf
    return max(low, -edge), min(schema["maximum"], edge), is_whole


def wrong_values(name: str) -> Iterator[str]:
    low, high, is_whole = bounds_of(name)
    yield from ("x", "1e", "--1", str(low - 1), str(high + 1))
    if is_whole:
        yield "1.5"
    if is_open(name):
        yield str(low)


def is_open(name: str) -> bool:
    """Return whether a field's values are above its lowest bound."""
    return "exclusiveMinimum" in CHAT_FIELDS[name]["anyOf"][0]


def open_settings(page: Page) -> None:
    page.keyboard.press("Alt+s")
    page.get_by_label("Temperature").wait_for()
    page.locator("option[value=scripted]").wait_for(state="attached")


def is_marked(field: Locator) -> bool:
    """Return whether a field is marked as wrong, for the eye and for screen readers."""
    usual = field.page.locator("textarea[name=system]").first.evaluate(BORDER)
    is_red = field.evaluate(BORDER) != usual
    assert is_red == (field.get_attribute("aria-invalid") == "true")
    return is_red


@pytest.mark.parametrize("name", [*LABELS, *RARE_LABELS])
def test_a_number_out_of_bounds_is_not_sent_and_the_bounds_are_named(
    visit: Visitor, engine: ScriptedEngine, name: str
) -> None:
    page = visit().open()
    open_settings(page)
    label = {**LABELS, **RARE_LABELS}[name]
    field = page.get_by_label(label, exact=True)
    if name in RARE_LABELS:
        page.get_by_text("More samplers").click()
    page.get_by_label("Message", exact=True).fill("hi")
    low, high, is_whole = bounds_of(name)
    for value in wrong_values(name):
        before = len(engine.generates)
        field.fill(value)
        page.get_by_role("button", name="Send").click()
        kind = "a whole number" if is_whole else "a number"
        problem = page.locator(".problem").get_by_text(f"{label} must be {kind}")
        problem.wait_for()
        assert problem.inner_text().endswith(f", not {value}.")
        assert f"{high:,}" in problem.inner_text()
        assert f"{low:,}" in problem.inner_text()
        assert is_marked(field), value
        assert page.locator(".message").count() == 0
        assert len(engine.generates) == before
    for number in (1, high, *([] if is_open(name) else [low])):
        field.fill(str(number))
        assert not is_marked(field), number


def test_the_rare_samplers_are_folded_and_are_sent(visit: Visitor, engine: ScriptedEngine) -> None:
    page = visit().open()
    open_settings(page)
    multiplier = page.get_by_label("DRY multiplier")
    assert not multiplier.is_visible()
    page.get_by_text("More samplers").click()
    assert page.get_by_label("DRY base").get_attribute("placeholder") == "1.75"
    page.get_by_label("DRY base").press("ArrowUp")
    multiplier.fill("0.8")
    send(page, "hi")
    await_answer(page, "Hello, world!")
    params = engine.generates[-1].params
    assert (params.dry_multiplier, params.dry_base) == (0.8, 1.8)
    page.reload()
    await_answer(page, "Hello, world!")
    open_settings(page)
    assert multiplier.is_visible(), "a group with a setting is open"


@pytest.mark.parametrize(
    ("extra", "limit"),
    [("", 1024), ('{"max_tokens": 7}', 7), ('{"max_completion_tokens": 8}', 8)],
    ids=["default", "max_tokens", "max_completion_tokens"],
)
def test_an_answer_has_a_usual_limit_unless_one_is_set(
    visit: Visitor, engine: ScriptedEngine, extra: str, limit: int
) -> None:
    page = visit().open()
    open_settings(page)
    assert page.get_by_label("Max tokens").get_attribute("placeholder") == "1024"
    page.get_by_text("Other fields").click()
    page.get_by_label("A JSON object").fill(extra)
    send(page, "hi")
    await_answer(page, "Hello")
    assert engine.generates[-1].params.max_tokens == limit


def test_too_many_or_too_long_stop_sequences_are_not_sent(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    before = len(engine.generates)
    page = visit().open()
    open_settings(page)
    for text in ("\n".join("abcdefghijklmnopq"), "x" * 1025):
        page.get_by_label("Stop sequences").fill(text)
        send(page, "hi")
        words = "Stop sequences must be at most 16 lines of at most 1,024 characters."
        page.locator(".problem").get_by_text(words).wait_for()
        assert is_marked(page.get_by_label("Stop sequences"))
    assert len(engine.generates) == before


def test_the_shared_numbers_of_a_comparison_have_bounds_as_well(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    visitor = visit()
    release = visitor.hold("/openapi.json")
    page = visitor.open("/#compare")
    before = len(engine.generates)
    page.get_by_label("Prompt").fill("hi")
    page.get_by_label("Seed").fill("-0.5")
    release()
    page.locator("#compare-seed[aria-invalid=true]").wait_for()  # as soon as the bounds are known
    for label, value in (("Seed", "1.5"), ("Max tokens", "0"), ("Max tokens", "many")):
        field = page.get_by_label(label, exact=True)
        usual = field.input_value()
        field.fill(value)
        page.get_by_role("button", name="Compare", exact=True).click()
        page.get_by_text(f"{label} must be a whole number").wait_for()
        assert is_marked(field)
        field.fill(usual)
    assert len(engine.generates) == before


def test_wrong_settings_are_marked_after_a_reload(visit: Visitor, engine: ScriptedEngine) -> None:
    page = visit().open()
    open_settings(page)
    send(page, "hi")
    await_answer(page, "Hello, world!")
    page.get_by_label("Temperature").fill("99")
    page.wait_for_function(STORED_99)
    page.reload()
    await_answer(page, "Hello, world!")
    open_settings(page)
    page.locator("[name=temperature][aria-invalid=true]").wait_for()
    assert page.get_by_label("Temperature").input_value() == "99"


STORED_99 = """async () => {
  const done = (request) => new Promise((resolve) =>
    (request.onsuccess = () => resolve(request.result)));
  const database = await done(indexedDB.open("tidegate"));
  const found = await done(
    database.transaction("conversations").objectStore("conversations").getAll());
  database.close();
  return found.some(({ conversation }) => conversation.settings.temperature === "99");
}"""


def test_settings_that_a_new_conversation_takes_over_are_shown_and_can_be_reset(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open()
    shown = page.locator(".changed")
    open_settings(page)
    assert shown.inner_text() == ""
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("System message").fill("Be brief.")
    page.keyboard.press("Alt+s")
    send(page, "hi")
    page.get_by_text("The answer reached its token limit.").wait_for()
    page.keyboard.press("Alt+n")
    shown.get_by_text("Settings: system message, max tokens 3").wait_for()
    shown.get_by_role("button", name="Change").click()
    assert page.get_by_label("Max tokens").input_value() == "3"
    shown.get_by_role("button", name="Use the defaults").click()
    assert shown.inner_text() == ""
    assert page.get_by_label("Max tokens").input_value() == ""
    send(page, "hi")
    await_answer(page, "Hello, world!")
    assert engine.generates[-1].params.max_tokens != 3


def test_a_text_that_was_not_sent_survives_a_reload(visit: Visitor) -> None:
    page = visit().open()
    message = page.get_by_label("Message", exact=True)
    message.fill("not sent\nyet")
    page.reload()
    page.locator("option[value=scripted]").wait_for(state="attached")
    assert message.input_value() == "not sent\nyet"
    message.press("Enter")
    await_answer(page, "Hello, world!")
    page.reload()
    await_answer(page, "Hello, world!")
    assert message.input_value() == ""


def test_settings_can_be_typed_while_the_models_arrive(visit: Visitor) -> None:
    visitor = visit()
    release = visitor.hold("/v1/models")
    page = visitor.open()
    page.keyboard.press("Alt+s")
    page.get_by_text("Other fields").click()
    temperature = page.get_by_label("Temperature")
    temperature.press_sequentially("0.5")
    temperature.press("ArrowLeft")
    release()
    page.locator("option[value=scripted]").wait_for(state="attached")
    page.keyboard.type("2")
    assert temperature.input_value() == "0.25"
    assert page.get_by_label("A JSON object").is_visible()


def model_is(visitor: Any, state: str) -> None:
    """Let the server's list of models say that the model is in this state."""

    def answer(route: Any) -> None:
        found = route.fetch()
        models = found.json()
        for model in models["data"]:
            model["state"] = state
        route.fulfill(response=found, json=models)

    visitor.context.unroute("**/v1/models")
    visitor.context.route("**/v1/models", answer)


def test_the_menu_follows_the_states_of_the_models(visit: Visitor) -> None:
    visitor = visit()
    model_is(visitor, "loading")
    page = visitor.open()
    option = page.locator("option[value=scripted]")
    option.get_by_text(re.compile(r"^scripted \(loading, \d+ s\)$")).wait_for(state="attached")
    page.locator(".empty").get_by_text("· loading").wait_for()
    page.get_by_label("Message", exact=True).fill("not lost")
    model_is(visitor, "ready")
    page.get_by_role("option", name="scripted", exact=True).wait_for(state="attached")
    assert page.locator(".empty").get_by_text("loading").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "not lost"


def test_a_chat_says_that_its_model_is_loading(visit: Visitor) -> None:
    visitor = visit()
    model_is(visitor, "unloaded")
    page = visitor.open()
    page.get_by_text("scripted (asleep, loads on use)").wait_for(state="attached")
    release = visitor.hold("/v1/chat/completions")
    send(page, "hi")
    page.locator(".answer").get_by_text("Loading scripted …").wait_for()
    model_is(visitor, "loading")
    page.locator(".answer").get_by_text(re.compile(r"Loading scripted …, \d+ s")).wait_for()
    model_is(visitor, "ready")
    release()
    await_answer(page, "Hello, world!")
    assert not page.get_by_text("Loading scripted").is_visible()
    page.get_by_text("with the loading of the model").wait_for()
    page.get_by_role("option", name="scripted", exact=True).wait_for(state="attached")


def test_a_comparison_says_that_a_model_is_loading(visit: Visitor) -> None:
    visitor = visit()
    model_is(visitor, "unloaded")
    page = visitor.open("/#compare")
    page.get_by_text("scripted (asleep, loads on use)").first.wait_for(state="attached")
    release = visitor.hold("/v1/chat/completions")
    page.get_by_label("Prompt").fill("hi")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".output").first.get_by_text("The model is loading …").wait_for()
    model_is(visitor, "ready")
    release()
    page.locator(".verdict", has_text="The answers are identical.").wait_for()
    page.get_by_role("option", name="scripted", exact=True).first.wait_for(state="attached")
    assert "with the loading of the model" in page.locator(".facts-table").inner_text()
    assert page.get_by_text("asleep").count() == 0
