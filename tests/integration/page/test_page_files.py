"""Text files that are added to a message of the chat: chosen, dropped or pasted."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.browser import await_answer, await_stored, send
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, prompt_of, thinking_card

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NOTES = "The tide is high.\n```\ncode\n```\n"
"""The scripted model has a token for each byte."""
GIVE = """([target, event, name, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name));
  const options = { bubbles: true, cancelable: true };
  const given = event === "paste"
    ? new ClipboardEvent(event, { ...options, clipboardData: transfer })
    : new DragEvent(event, { ...options, dataTransfer: transfer });
  const element = document.querySelector(target);
  if (event === "drop" && element.dispatchEvent(new DragEvent("dragover", { ...options,
    dataTransfer: transfer }))) throw new Error("files cannot be dropped here");
  return element.dispatchEvent(given);
}"""


def choose(page: Page, name: str, data: bytes) -> None:
    file: Any = {"name": name, "mimeType": "application/octet-stream", "buffer": data}
    page.get_by_label("Files to add").set_input_files([file])


def give(page: Page, event: str, target: str, name: str, data: bytes) -> None:
    """Drop or paste a file. Fail if the browser would open it instead."""
    coded = base64.b64encode(data).decode()
    assert not page.evaluate(GIVE, [target, event, name, coded]), "the page did not take the event"


def test_a_file_is_sent_stored_and_shown_with_its_message(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open()
    page.get_by_role("button", name="Add files").wait_for()
    choose(page, "notes.md", NOTES.encode())
    page.locator(".files").get_by_text(f"{len(NOTES)} tokens").wait_for()
    send(page, "What is high?")
    await_answer(page, "Hello, world!")
    fenced = f'<user>File "notes.md":\n````\n{NOTES}````\n\nWhat is high?<assistant>'
    assert fenced in prompt_of(engine)
    assert page.locator(".files .file").count() == 0
    await_stored(page, "What is high?", "What is high?")
    page.reload()
    file = page.locator(".message.user .file")
    file.get_by_text("notes.md").click()
    assert file.locator("pre").text_content() == NOTES
    assert page.locator(".bubble").inner_text() == "What is high?"
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("What is low?")
    page.get_by_role("button", name="Send again").click()
    await_answer(page, "Hello, world!")
    assert '<user>File "notes.md":' in prompt_of(engine)
    assert "What is low?<assistant>" in prompt_of(engine)


def test_files_are_dropped_pasted_and_removed_before_sending(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open()
    page.get_by_label("Message", exact=True).wait_for()
    give(page, "drop", ".thread", "dropped.txt", b"one")
    give(page, "paste", "#prompt", "pasted.txt", b"three")
    page.locator(".files").get_by_text("3 tokens").wait_for()
    page.locator(".files").get_by_text("5 tokens").wait_for()
    page.get_by_role("button", name="Remove dropped.txt").click()
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Send").click()  # a file needs no text beside it
    await_answer(page, "Hello, world!")
    assert '<user>File "pasted.txt":\n```\nthree\n```<assistant>' in prompt_of(engine)
    assert page.locator(".conversations .title").inner_text() == "pasted.txt"
    assert page.locator(".bubble").count() == 0


def test_files_that_are_not_sent_survive_a_reload_and_stay_with_their_conversation(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open()
    send(page, "Hello")
    await_answer(page, "Hello, world!")
    await_stored(page, "Hello", "Hello, world!")
    choose(page, "notes.txt", b"four")
    choose(page, "other.txt", b"seven")
    files = page.locator(".files")
    files.get_by_text("5 tokens").wait_for()
    page.get_by_role("button", name="Remove other.txt").click()
    page.reload()
    files.get_by_text("4 tokens").wait_for()
    assert files.locator(".name").all_inner_texts() == ["notes.txt"]
    page.get_by_role("button", name="New conversation").first.click()
    assert files.locator(".file").count() == 0
    page.locator(".conversations .title").first.click()
    files.get_by_text("4 tokens").wait_for()
    page.get_by_role("button", name="Send").click()
    page.locator(".message.answer[aria-busy=false]").nth(1).wait_for()
    assert 'File "notes.txt":' in prompt_of(engine)
    page.reload()
    page.locator(".message.answer").first.get_by_text("Hello, world!").wait_for()
    assert files.locator(".file").count() == 0


UTF_16 = "Flut und Ebbe: ÄÖ".encode("utf-16")


@pytest.mark.parametrize(
    ("data", "tokens"), [("größer".encode(), 8), (UTF_16, 19)], ids=["utf-8", "utf-16"]
)
def test_texts_of_usual_encodings_are_read(visit: Visitor, data: bytes, tokens: int) -> None:
    page = visit().open()
    page.get_by_role("button", name="Add files").wait_for()
    choose(page, "text.txt", data)
    page.locator(".files").get_by_text(f"{tokens} tokens").wait_for()


REFUSED = {
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0", "picture.png is not a text file."),
    "paper.pdf": (
        b"%PDF-1.7 ...",
        'paper.pdf is a PDF. Only text files can be added: pdftotext "paper.pdf" makes one.',
    ),
    "zeros.txt": (b"abc\0def", "zeros.txt is not a text file."),
    "empty.txt": (b" \n", "empty.txt is empty."),
    "large.txt": (b"x" * 4_100_000, "large.txt has 4.1 MB; files may have 4 MB."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_sent_is_refused_with_the_reason(visit: Visitor, name: str) -> None:
    data, reason = REFUSED[name]
    page = visit().open()
    page.get_by_role("button", name="Add files").wait_for()
    choose(page, name, data)
    page.locator(".problem").get_by_text(reason, exact=True).wait_for()
    assert page.locator(".files .file").count() == 0


@pytest.fixture(scope="module")
def small(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Yield a gateway whose model has a context of 512 tokens."""
    address = f"ipc://{tmp_path_factory.mktemp('small') / 'engine.sock'}"
    with (
        ScriptedEngine(address, card=thinking_card(), max_len=512) as engine,
        GatewayProcess(engine=engine.address, log_requests=False) as gateway,
    ):
        yield gateway.await_ready()


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (200, r"long\.txt has 1,000 tokens, but the context of .+ has 512 tokens\."),
        (40_000, r"long\.txt: This model's maximum context length is .+ are not tokenized"),
    ],
    ids=["counted", "not counted"],
)
def test_a_file_that_exceeds_the_context_is_marked_and_not_sent(
    visit: Visitor, small: GatewayProcess, times: int, reason: str
) -> None:
    """The server does not count the tokens of a text that is much too long."""
    page = visit(small.url, refused=(400,)).open()
    page.get_by_text("512 tokens", exact=False).first.wait_for()
    choose(page, "long.txt", b"tide " * times)
    page.locator(".files .too-long").wait_for()
    send(page, "Shorten.")
    page.locator(".problem").get_by_text(re.compile(reason)).wait_for()
    assert page.locator(".message").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "Shorten."
