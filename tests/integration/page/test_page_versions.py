"""The versions of messages in the chat of the web page, which are kept with the conversation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.integration.page.conftest import Visitor
from tests.integration.page.test_page_chat import WORDS, replies
from tests.support.browser import await_answer, await_stored, send, texts_of
from tests.support.scripted_engine import ScriptedEngine, prompt_of
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Page


def texts(page: Page) -> list[str]:
    """Return the messages that the page shows."""
    return texts_of(page, ".bubble, .answer .markdown")


def places(page: Page) -> list[str]:
    """Return the places that the page shows, such as "1/2", of the messages with versions."""
    return page.locator(".versions:visible").all_inner_texts()


def edit(page: Page, place: int, text: str) -> None:
    message = page.locator(".message.user").nth(place)
    message.hover()
    message.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill(text)
    page.get_by_role("button", name="Send again").click()


def ask_in_versions(page: Page) -> None:
    """Ask a question, let it be answered twice, ask another one after that, and edit it."""
    send(page, "One?")
    await_answer(page, "First.")
    page.get_by_role("button", name="Retry").click()
    await_answer(page, "Second.")
    send(page, "Two?")
    await_answer(page, "Third.")
    edit(page, 1, "Two, please?")
    await_answer(page, "Fourth.")


ANSWERS = ("First.", "Second.", "Third.", "Fourth.", "Fifth.")


def test_each_version_keeps_what_followed_it(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, *ANSWERS)
    page = visit().open()
    ask_in_versions(page)
    assert texts(page) == ["One?", "Second.", "Two, please?", "Fourth."]
    assert places(page) == ["2/2", "2/2"]
    page.get_by_role("button", name="Previous version").last.click()
    assert texts(page) == ["One?", "Second.", "Two?", "Third."]
    page.get_by_role("button", name="Previous version").first.click()
    assert texts(page) == ["One?", "First."]
    assert places(page) == ["1/2"]
    page.get_by_role("button", name="Next version").click()
    assert texts(page) == ["One?", "Second.", "Two?", "Third."], "as it was shown last"


def test_only_the_branch_that_is_shown_is_sent(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, *ANSWERS)
    page = visit().open()
    ask_in_versions(page)
    page.get_by_role("button", name="Previous version").first.click()
    send(page, "Three?")
    await_answer(page, "Fifth.")
    assert prompt_of(engine) == "<user>One?<assistant>First.<user>Three?<assistant>"


def test_versions_survive_a_reload_and_are_exported(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, *ANSWERS)
    page = visit().open()
    ask_in_versions(page)
    page.get_by_role("button", name="Previous version").last.click()
    await_stored(page, "One?", "Third.")
    page.reload()
    await_answer(page, "Third.")
    assert texts(page) == ["One?", "Second.", "Two?", "Third."]
    page.get_by_role("button", name="Next version").last.click()
    assert texts(page) == ["One?", "Second.", "Two, please?", "Fourth."]
    page.locator(".conversations li").hover()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export “One?”").click()
    (saved,) = json.loads(download.value.path().read_text())["conversations"]
    assert [each["content"] for each in saved["messages"]] == texts(page)
    assert {each["content"] for each in saved["hidden"]} == {"First.", "Two?", "Third."}


def await_texts(page: Page, *last: str) -> None:
    """Wait until the conversation ends with these texts. They are drawn with the next frame."""
    assert eventually(lambda: texts(page)[-len(last) :] == list(last)), texts(page)


def test_versions_can_be_chosen_with_the_keyboard(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, *ANSWERS)
    page = visit().open()
    ask_in_versions(page)
    page.keyboard.press("Alt+,")
    assert texts(page)[-1] == "Fourth.", "the last answer has one version"
    group = page.get_by_role("group", name="Version 2 of 2").last
    group.get_by_role("button", name="Previous version").focus()
    page.keyboard.press("ArrowLeft")
    await_texts(page, "Two?", "Third.")
    page.keyboard.press("ArrowRight")
    await_texts(page, "Two, please?", "Fourth.")
    page.keyboard.press("Enter")
    await_texts(page, "Two?", "Third.")
    page.keyboard.press("Alt+r")
    await_answer(page, "Fifth.")
    page.keyboard.press("Alt+,")
    await_texts(page, "Third.")
    assert places(page)[-1] == "1/2"
    page.keyboard.press("Alt+.")
    await_texts(page, "Fifth.")
    assert places(page)[-1] == "2/2"


def test_versions_are_locked_while_an_answer_is_streamed(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, "First.", WORDS)
    page = visit().open()
    send(page, "One?")
    await_answer(page, "First.")
    edit(page, 0, "Two?")
    await_answer(page, "end")
    engine.step_s = 0.03
    page.get_by_role("button", name="Retry").click()
    page.locator(".answer .markdown", has_text="word0").wait_for()
    previous = page.locator(".message.user").get_by_role("button", name="Previous version")
    assert previous.is_disabled()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    assert previous.is_enabled()
    engine.step_s = 0.0005


def test_an_answer_that_failed_is_no_version(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, "First.")
    visitor = visit(refused=(400,))
    page = visitor.open()
    page.keyboard.press("Alt+s")
    page.get_by_text("Other fields").click()
    page.get_by_label("A JSON object").fill('{"temperature": 9}')
    send(page, "One?")
    page.locator(".answer [role=alert]").wait_for()
    page.get_by_label("A JSON object").fill("")
    page.get_by_role("button", name="Retry").click()
    await_answer(page, "First.")
    assert places(page) == []


STORE_OLD = """async () => {
  const message = (id, role, content) => ({ id, role, content, calls: [], reasoning: "" });
  const conversation = {
    id: "old", title: "Old", model: "scripted", settings: {}, used: 1,
    messages: [message("a", "user", "One?"), message("b", "assistant", "First.")],
  };
  const done = (request) => new Promise((resolve) =>
    (request.onsuccess = () => resolve(request.result)));
  const database = await done(indexedDB.open("tidegate"));
  await done(database.transaction("conversations", "readwrite").objectStore("conversations")
    .put({ id: "old", used: 1, bytes: 100, conversation }));
  database.close();
}"""
"""Stores a conversation as the page did before messages had versions."""


def test_a_conversation_of_before_there_were_versions_gets_them(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, "Second.")
    page = visit().open()
    page.evaluate(STORE_OLD)
    page.goto("about:blank")
    page.go_back()
    page.get_by_role("button", name="Old", exact=True).click()
    page.get_by_role("button", name="Retry").click()
    await_answer(page, "Second.")
    page.get_by_role("button", name="Previous version").click()
    assert texts(page) == ["One?", "First."]
