"""The dialog of the web page in which models are downloaded and deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.page.conftest import Visitor
from tests.support.browser import PHONE, await_answer, is_wider_than_screen, send
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, text_reply
from tests.support.scripted_library import GB, LARGE, OWN, SMALL, ScriptedLibrary

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def row(page: Page, name: str) -> Locator:
    return page.locator("dialog .library-row", has=page.get_by_text(name, exact=True))


def test_a_model_is_downloaded_across_a_reload_and_then_used_in_the_chat(
    library: tuple[ScriptedLibrary, GatewayProcess], visit: Visitor, engine: ScriptedEngine
) -> None:
    scripted, gateway = library
    engine.script = lambda generate: text_reply("I was downloaded.")
    page = visit(gateway.url).open()
    page.get_by_role("button", name="Models").click()
    page.get_by_text("8.0 GB of memory, 50.0 GB of free disk space").wait_for()
    page.get_by_text("Too large for this machine (1)").wait_for()
    assert not row(page, LARGE).is_visible()
    row(page, SMALL).get_by_text("recommended").wait_for()
    row(page, SMALL).get_by_text("about 3.0 GB of memory · at most 8.3 tokens/s here").wait_for()
    assert row(page, OWN).get_by_role("button").all_inner_texts() == ["Chat"]
    row(page, SMALL).get_by_role("button", name="Download").click()
    bar = page.get_by_role("progressbar", name=f"Download of {SMALL}")
    bar.wait_for()
    scripted.has_received(GB // 2)
    row(page, SMALL).get_by_text("500 MB of 2.0 GB").wait_for()
    assert float(bar.evaluate("bar => bar.value")) == 0.25
    page.reload()
    page.get_by_role("button", name="Models 25 %").click()
    row(page, SMALL).get_by_text("500 MB of 2.0 GB").wait_for()
    scripted.has_downloaded()
    row(page, SMALL).get_by_text("ready to use").wait_for()
    row(page, SMALL).get_by_role("button", name="Chat").click()
    page.locator("dialog").wait_for(state="detached")
    assert page.locator("select.model").input_value() == SMALL
    send(page, "Hi")
    await_answer(page, "I was downloaded.")


def test_the_dialog_works_with_a_keyboard_alone_on_a_phone(
    library: tuple[ScriptedLibrary, GatewayProcess], visit: Visitor
) -> None:
    scripted, gateway = library
    scripted.is_served = True
    scripted.publish()
    page = visit(gateway.url, size=PHONE).open()
    button = page.get_by_role("button", name="Models")
    button.focus()
    page.keyboard.press("Enter")
    row(page, SMALL).wait_for()
    assert not is_wider_than_screen(page)
    dialog = page.locator("dialog")
    assert dialog.evaluate("each => each.scrollWidth <= each.clientWidth")
    row(page, SMALL).get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    assert row(page, SMALL).get_by_role("button", name="Really delete").is_visible()
    assert scripted.is_served
    page.keyboard.press("Enter")
    download = row(page, SMALL).get_by_role("button", name="Download")
    download.wait_for()
    assert download.evaluate("each => each === document.activeElement")
    page.keyboard.press("Enter")
    row(page, SMALL).get_by_role("button", name="Cancel").wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert button.evaluate("each => each === document.activeElement")


def test_a_refusal_is_shown_in_the_dialog(
    library: tuple[ScriptedLibrary, GatewayProcess], visit: Visitor
) -> None:
    _, gateway = library
    page = visit(gateway.url, refused=(400,)).open()
    page.get_by_role("button", name="Models").click()
    page.get_by_label("Another model of the Hugging Face Hub").fill("x" * 2000)
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("model").wait_for()


def test_a_server_whose_models_are_the_operators_shows_no_button(visit: Visitor) -> None:
    page = visit().open()
    page.locator("select.model option").first.wait_for(state="attached")
    with page.expect_response("**/version"):
        page.reload()
    assert page.get_by_role("button", name="Models").count() == 0
