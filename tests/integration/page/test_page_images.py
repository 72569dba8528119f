"""Images that are added to a message of the chat."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import requests

from tests.integration.page.conftest import Visitor
from tests.support.axe import axe_script, violations
from tests.support.browser import send
from tests.support.gateway_process import GatewayProcess
from tests.support.image_models import SMOLVLM, picture
from tests.support.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PASTE = """([name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const clipboardData = new DataTransfer();
  clipboardData.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true, clipboardData };
  return document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", options));
}"""
SMALL, LARGE = picture(120, 90), picture(4096, 64)


@pytest.fixture(scope="module")
def seeing(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GatewayProcess, ScriptedEngine]]:
    """Yield a gateway whose model reads images, and its engine."""
    address = f"ipc://{tmp_path_factory.mktemp('seeing') / 'engine.sock'}"
    with (
        ScriptedEngine(address, card=SMOLVLM.card(name="tiny", context_tokens=2048)) as engine,
        GatewayProcess(engine=engine.address, tried_tokenizer="", log_requests=False) as gateway,
    ):
        yield gateway.await_ready(), engine


def paste(page: Page, name: str, data: bytes, kind: str = "image/png") -> None:
    """Paste a file. Fail if the browser would handle it instead of the page."""
    coded = base64.b64encode(data).decode()
    assert not page.evaluate(PASTE, [name, kind, coded]), "the page did not take the event"


def await_end(page: Page, answers: int) -> None:
    """Wait until the conversation has a number of answers, and all of them are complete."""
    page.locator(".message.answer[aria-busy=false]").nth(answers - 1).wait_for()


def test_a_pasted_image_is_sent_stored_and_shown_with_its_message(
    visit: Visitor, seeing: tuple[GatewayProcess, ScriptedEngine]
) -> None:
    gateway, engine = seeing
    page = visit(gateway.url).open()
    page.get_by_role("button", name="Add files or images").wait_for()
    paste(page, "other.png", LARGE)
    paste(page, "tide.png", SMALL)
    files = page.locator(".files")
    files.get_by_text("2048 \u00d7 32").wait_for()  # the other side is as much smaller
    files.get_by_text("120 \u00d7 90").wait_for()
    page.get_by_role("button", name="Remove other.png").click()
    page.reload()  # an image that is not sent yet survives
    files.get_by_text("120 \u00d7 90").wait_for()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        assert violations(page, axe_script()) == []
    send(page, "What is this?")
    await_end(page, 1)
    assert len(engine.attached) == 1
    assert files.locator(".file").count() == 0
    page.reload()
    shown = page.locator(".message.user").get_by_role("img", name="tide.png")
    shown.wait_for()
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 120
    assert violations(page, axe_script()) == []
    send(page, "And what is beside it?")
    await_end(page, 2)
    assert [len(each.attachments) for each in engine.generates] == [1, 1]
    assert len(engine.attached) == 1  # it is the same image: no bit of it has changed


def test_a_file_that_is_no_image_is_refused_before_it_is_sent(
    visit: Visitor, seeing: tuple[GatewayProcess, ScriptedEngine]
) -> None:
    page = visit(seeing[0].url).open()
    page.get_by_role("button", name="Add files or images").wait_for()
    paste(page, "torn.png", SMALL[:40])
    page.locator(".problem").get_by_text("torn.png cannot be read as an image.").wait_for()
    assert page.locator(".files .file").count() == 0


def test_the_page_says_why_a_model_of_text_reads_no_image(visit: Visitor) -> None:
    page = visit().open()
    page.get_by_role("button", name="Add files", exact=True).wait_for()
    paste(page, "tide.png", SMALL)
    page.locator(".files").get_by_text("not read by this model").wait_for()
    send(page, "What is this?")
    reason = "tide.png cannot be sent: this model reads text only."
    page.locator(".problem").get_by_text(reason).wait_for()
    assert page.locator(".message").count() == 0


def test_lists_of_models_say_which_ones_read_images(
    gateway: GatewayProcess, seeing: tuple[GatewayProcess, ScriptedEngine]
) -> None:
    """In the words of each API, as their clients read them."""
    found = []
    for url in (gateway.url, seeing[0].url):
        (model,) = requests.get(f"{url}/v1/models", timeout=20).json()["data"]
        body = {"model": model["id"]}
        shown = requests.post(f"{url}/api/show", json=body, timeout=20).json()
        props = requests.get(f"{url}/props", timeout=20).json()
        vision = "vision" in shown["capabilities"], props["modalities"]["vision"]
        found.append((model["images"], *vision))
    assert found == [
        ({"accepted": False, "why": "this model reads text only"}, False, False),
        ({"accepted": True, "why": ""}, True, True),
    ]
