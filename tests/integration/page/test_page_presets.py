"""Presets of the web page: settings with a name, which are kept, chosen, changed and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.page.conftest import Visitor
from tests.integration.page.test_page_list import export, import_text
from tests.support.browser import await_answer, await_models, send
from tests.support.scripted_engine import ScriptedEngine, prompt_of

if TYPE_CHECKING:
    from playwright.sync_api import Page


def save_preset(page: Page, name: str, **settings: str) -> None:
    """Enter settings, by their labels, and save them as a preset."""
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.get_by_role("button", name="Save as a preset").click()
    page.get_by_label("Name of the preset").fill(name)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Rename").first.wait_for()


def chosen(page: Page) -> str:
    """Return the preset that the panel shows."""
    name: str = page.get_by_label("Preset", exact=True).evaluate(
        "select => select.selectedOptions[0].textContent"
    )
    return name


def test_a_preset_is_made_of_the_settings_and_chosen_for_a_new_conversation(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open()
    await_models(page)
    page.keyboard.press("Alt+s")
    assert chosen(page) == "None: the defaults"
    save_preset(page, "Pirate", System_message="Talk like a pirate.", Temperature="1.5")
    assert chosen(page) == "Pirate"
    page.locator(".changed").get_by_text(
        "preset “Pirate”: system message, temperature 1.5"
    ).wait_for()
    page.get_by_label("Temperature").fill("1.4")
    assert chosen(page) == "Not saved"
    page.locator(".changed").get_by_role("button", name="Use the defaults").click()
    assert chosen(page) == "None: the defaults"
    page.reload()
    page.get_by_role("group", name="Presets").get_by_role("button", name="Pirate").click()
    assert page.get_by_role("button", name="Pirate").get_attribute("aria-pressed") == "true"
    page.keyboard.type("hi")  # the message has the focus
    page.keyboard.press("Enter")
    await_answer(page, "Hello, world!")
    assert prompt_of(engine).startswith("<system>Talk like a pirate.")
    assert engine.generates[-1].params.temperature == 1.5


def test_a_preset_can_be_chosen_renamed_replaced_and_deleted(visit: Visitor) -> None:
    page = visit().open()
    await_models(page)
    page.keyboard.press("Alt+s")
    save_preset(page, "Cold", Temperature="0")
    page.get_by_label("Temperature").fill("1.8")
    save_preset(page, "Hot")
    page.get_by_label("Preset", exact=True).select_option("Cold")
    assert page.get_by_label("Temperature").input_value() == "0"
    page.locator("#chat-settings").get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the preset").fill("Exact")
    page.keyboard.press("Enter")
    assert chosen(page) == "Exact"
    page.get_by_label("Temperature").fill("0.1")
    save_preset(page, "Exact")
    names = page.get_by_label("Preset", exact=True).locator("option")
    assert names.all_inner_texts() == ["None: the defaults", "Exact", "Hot"]
    page.locator("#chat-settings").get_by_role("button", name="Delete").click()
    assert chosen(page) == "Not saved"
    assert page.get_by_label("Temperature").input_value() == "0.1", "the settings stay"
    page.get_by_label("Preset", exact=True).select_option("None: the defaults")
    assert page.get_by_label("Temperature").input_value() == ""


def test_presets_are_exported_and_imported_without_duplicates(visit: Visitor) -> None:
    page = visit().open()
    await_models(page)
    page.keyboard.press("Alt+s")
    save_preset(page, "Cold", Temperature="0")
    send(page, "hi")
    await_answer(page, "Hello, world!")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    saved = Path(download.value.path()).read_text()
    assert [each["name"] for each in json.loads(saved)["presets"]] == ["Cold"]
    other = visit().open()
    assert import_text(other, saved) == "1 conversation was added, 1 preset was added."
    assert "preset" not in import_text(other, saved)
    other.get_by_role("group", name="Presets").get_by_role("button", name="Cold").wait_for()
    wrong = json.loads(export()) | {"presets": [{"id": "a", "name": "b", "settings": {"seed": 1}}]}
    assert "presets[0].settings must be texts" in import_text(other, json.dumps(wrong))
