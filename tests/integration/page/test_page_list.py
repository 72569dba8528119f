"""The list of conversations of the web page: search, import, and texts that are not sent yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.page.conftest import Visitor
from tests.integration.page.test_page_chat import replies
from tests.support.browser import await_answer, await_stored, send, texts_of
from tests.support.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

MANY, PIECE = 500, 50
PARAGRAPH = "The tide rises and falls twice a day, since the moon pulls the water of the sea. " * 12


def message(id: str, role: str, content: str) -> dict[str, Any]:
    answer = {"reasoning": "", "calls": [], "model": "scripted", "settings": {}, "finish": "stop"}
    return {"id": id, "role": role, "content": content} | (answer if role == "assistant" else {})


def conversation(id: str, *texts: str, used: int = 1, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [message(f"{id}-{n}", roles[n % 2], text) for n, text in enumerate(texts)]
    parts = {"id": id, "title": texts[0][:60], "model": "scripted", "settings": {}, "used": used}
    return parts | {"messages": messages} | fields


def export(*conversations: dict[str, Any]) -> str:
    return json.dumps({"tidegate": 1, "conversations": conversations})


def import_text(page: Page, text: str, name: str = "export.json") -> str:
    """Import a file, and return what the page says about it."""
    page.locator(".news").evaluate("element => element.replaceChildren()")
    page.get_by_label("File of conversations").set_input_files(
        {"name": name, "mimeType": "application/json", "buffer": text.encode()}
    )
    page.locator(".news span").wait_for()
    return page.locator(".news").inner_text()


TITLES = """all => all.map((each) => [...each.childNodes]
  .filter((node) => node.className !== "excerpt").map((node) => node.textContent).join(""))"""


def titles(page: Page) -> list[str]:
    """Return the titles in the list, without the texts that were found."""
    shown: list[str] = page.locator(".conversations li:not(.rest) .title").evaluate_all(TITLES)
    return shown


def test_the_search_finds_titles_and_texts_and_marks_the_words(visit: Visitor) -> None:
    page = visit().open()
    import_text(
        page,
        export(
            conversation("a", "About fruits", "An apple is red.", used=3),
            conversation("b", "Why?", "x " * 200 + "because the MOON pulls\nthe water.", used=2),
            conversation("c", "Moon landing", "In 1969.", used=1),
        ),
    )
    search = page.get_by_label("Search conversations")
    search.fill("moon")
    page.get_by_text("2 conversations", exact=True).wait_for()
    assert titles(page) == ["Why?", "Moon landing"]
    assert page.locator(".conversations mark").all_inner_texts()[:2] == ["MOON", "Moon"]
    assert "because the MOON pulls the water." in page.locator(".excerpt").first.inner_text()
    search.fill("moon water")
    page.get_by_text("1 conversation", exact=True).wait_for()
    page.keyboard.press("Enter")
    page.locator(".message.found", has_text="MOON").wait_for()
    search.fill("mo(on")
    page.get_by_text("Nothing found for “mo(on”.").wait_for()
    assert titles(page) == []
    page.keyboard.press("Escape")
    assert titles(page) == ["About fruits", "Why?", "Moon landing"]
    page.keyboard.press("Alt+k")
    assert search.evaluate("element => element === document.activeElement")


def test_a_conversation_is_opened_at_the_message_that_was_found(visit: Visitor) -> None:
    page = visit().open()
    texts = ["Question?", "A unique answer.", *[PARAGRAPH] * 20]
    import_text(page, export(conversation("a", *texts)))
    page.get_by_label("Search conversations").fill("unique")
    page.get_by_text("1 conversation", exact=True).wait_for()
    page.keyboard.press("Enter")
    found = page.locator(".message.found")
    found.get_by_text("A unique answer.").wait_for()
    page.get_by_role("button", name="Scroll to the end").wait_for()
    place = found.bounding_box()
    assert place is not None
    assert 0 < place["y"] < 700


def test_the_search_reads_many_conversations(visit: Visitor) -> None:
    """500 conversations of ten messages, 5 MB in all, are loaded, listed and searched."""
    page = visit().open()
    many = [
        conversation(f"c{n}", f"Question {n}", *[PARAGRAPH] * 9, f"unique{n}", used=n)
        for n in range(MANY)
    ]
    assert import_text(page, export(*many)) == f"{MANY} conversations were added."
    page.reload()
    page.get_by_text(f"Question {MANY - 1}", exact=True).wait_for()
    assert len(titles(page)) == PIECE
    page.get_by_label("Search conversations").fill("unique123")
    page.get_by_text("1 conversation", exact=True).wait_for()
    assert titles(page) == ["Question 123"]


def test_what_was_exported_can_be_imported_without_duplicates(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, "First.", "Second.", "Apples.")
    page = visit().open()
    assert page.get_by_role("button", name="Export all").count() == 0, "there is nothing to export"
    send(page, "One?")
    await_answer(page, "First.")
    page.get_by_role("button", name="Retry").click()
    await_answer(page, "Second.")
    page.keyboard.press("Alt+n")
    send(page, "Name a fruit.")
    await_answer(page, "Apples.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    saved = Path(download.value.path()).read_text()

    other = visit().open()
    assert import_text(other, saved) == "2 conversations were added."
    assert import_text(other, saved) == "No conversations were added, 2 were here already."
    other.get_by_role("button", name="One?", exact=True).click()
    await_answer(other, "Second.")
    other.get_by_role("button", name="Previous version").click()
    await_answer(other, "First.")
    with other.expect_download() as download:
        other.get_by_role("button", name="Export all").click()
    again = json.loads(Path(download.value.path()).read_text())
    assert [each["id"] for each in again["conversations"]] == [
        each["id"] for each in json.loads(saved)["conversations"]
    ]


def test_an_import_replaces_an_older_copy_even_while_it_is_shown(visit: Visitor) -> None:
    page = visit().open()
    import_text(page, export(conversation("a", "One?", "First.", used=1)))
    page.get_by_role("button", name="One?", exact=True).click()
    await_answer(page, "First.")
    newer = conversation("a", "One?", "Second.", "Two?", "Third.", used=2)
    words = "No conversations were added, 1 was replaced by a newer copy."
    assert import_text(page, export(newer)) == words
    assert texts_of(page, ".bubble, .answer .markdown") == [
        "One?",
        "Second.",
        "Two?",
        "Third.",
    ]
    assert "here already" in import_text(page, export(conversation("a", "One?", "First.", used=1)))
    await_answer(page, "Third.")
    await_stored(page, "One?", "Third.")


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """Return an export of one conversation with a change."""
    found = json.loads(export(conversation("a", "One?", "First.")))
    change(found)
    return json.dumps(found)


WRONG = {
    "no JSON": ("{", "It is not JSON"),
    "other JSON": ("[1]", "It is not an export of this page: the field “tidegate” is missing."),
    "a newer format": ('{"tidegate": 2}', "It has format 2, and this page reads format 1."),
    "no list": ('{"tidegate": 1, "conversations": {}}', "conversations must be a list."),
    "no id": (changed(lambda d: d["conversations"][0].pop("id")), "conversations[0].id must be"),
    "no message": (
        changed(lambda d: d["conversations"][0]["messages"].clear()),
        "conversations[0].messages is empty.",
    ),
    "a role": (
        changed(lambda d: d["conversations"][0]["messages"][0].update(role="system")),
        "conversations[0].messages[0].role must be one of user, assistant, tool.",
    ),
    "an image elsewhere": (
        changed(
            lambda d: d["conversations"][0]["messages"][0].update(
                files=[{"name": "a", "image": {"url": "https://a/b", "width": 1, "height": 1}}]
            )
        ),
        "conversations[0].messages[0].files[0].image.url must be a data: URL of an image.",
    ),
    "a text": (
        changed(lambda d: d["conversations"][0]["messages"][1].update(content=None)),
        "conversations[0].messages[1].content must be a text.",
    ),
    "an answer": (
        changed(lambda d: d["conversations"][0]["messages"][1].pop("settings")),
        "conversations[0].messages[1].settings must be an object.",
    ),
    "ids": (
        changed(lambda d: d["conversations"][0]["messages"][1].update(id="a-0")),
        "conversations[0] has two messages with the id a-0.",
    ),
    "a parent": (
        changed(lambda d: d["conversations"][0]["messages"][1].update(parent="x")),
        "conversations[0].messages[1].parent must be the id of the message before it.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_what_is_wrong(visit: Visitor, name: str) -> None:
    text, words = WRONG[name]
    page = visit().open()
    said = import_text(page, text, "wrong.json")
    assert said.startswith("wrong.json was not imported. ")
    assert words in said
    assert titles(page) == []


def test_a_text_that_was_not_sent_stays_with_its_conversation(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, "First.")
    page = visit().open()
    text = page.get_by_label("Message", exact=True)
    send(page, "One?")
    await_answer(page, "First.")
    text.fill("to be continued")
    page.keyboard.press("Alt+n")
    assert text.input_value() == ""
    text.fill("something new")
    page.get_by_role("button", name="One?", exact=True).click()
    assert text.input_value() == "to be continued"
    await_stored(page, "One?", "First.")
    page.reload()
    await_answer(page, "First.")
    assert text.input_value() == "to be continued"
    page.keyboard.press("Alt+n")
    assert text.input_value() == "something new"
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    assert page.get_by_role("button", name="Send").is_disabled()
