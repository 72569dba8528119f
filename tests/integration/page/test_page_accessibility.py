"""Each view of the web page as axe-core, a keyboard and a screen reader find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.axe import axe_script, violations
from tests.support.browser import (
    DESKTOP,
    PHONE,
    Visit,
    await_answer,
    await_models,
    is_wider_than_screen,
    send,
)
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, text_reply
from tests.support.scripted_library import ScriptedLibrary

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ANSWER = """<think>Fruits, and their colours.</think>
# Fruits

Three **fruits**, with a [link](https://example.com) and `code`:

1. apple
2. banana

| fruit | colour |
|---|---|
| apple | red |

> A quote.

```python
def mean(values: list[float]) -> float:
    return sum(values) / len(values)  # a comment that is longer than the screen of a phone is
```

$E = mc^2$
"""
LOADED = "select option, details.operation, .watch-engine"


def chat(visitor: Visit) -> Page:
    page = visitor.open()
    await_models(page)
    return page


def answers(visitor: Visit) -> Page:
    page = chat(visitor)
    send(page, "Name three fruits.")
    await_answer(page, "a comment")
    page.locator(".reasoning summary").click()
    return page


def settings(visitor: Visit) -> Page:
    page = chat(visitor)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Temperature").fill("99")
    return page


def conversations(visitor: Visit) -> Page:
    page = answers(visitor)
    button = page.get_by_role("button", name="Conversations")
    if button.is_visible():
        button.click()
    page.locator(".conversations li").first.hover()
    return page


def shortcuts(visitor: Visit) -> Page:
    page = chat(visitor)
    page.keyboard.press("Alt+/")
    page.get_by_role("dialog").wait_for()
    return page


def key(visitor: Visit) -> Page:
    page = chat(visitor)
    page.get_by_role("button", name="Enter an API key").click()
    page.get_by_role("dialog").wait_for()
    return page


def compare(visitor: Visit) -> Page:
    page = visitor.open("/#compare")
    page.locator(LOADED).first.wait_for(state="attached")
    page.locator("summary").first.click()
    return page


def compared(visitor: Visit) -> Page:
    page = compare(visitor)
    page.get_by_label("Prompt").fill("Name a fruit.")
    page.get_by_label("Temperature").first.fill("1.5")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".verdict", has_text="The answers").wait_for()
    return page


def watch(visitor: Visit) -> Page:
    page = visitor.open("/#watch")
    page.locator(".watch-engine").first.wait_for()
    page.get_by_text("In words").click()
    return page


def reference(visitor: Visit) -> Page:
    page = visitor.open("/reference#post_v1_chat_completions")
    body = page.locator("#post_v1_chat_completions .operation-body")
    body.wait_for()
    body.locator("summary").first.click()
    body.locator(".response summary").first.click()
    body.locator(".media").first.wait_for()
    return page


VIEWS = (
    *(chat, answers, settings, conversations, shortcuts, key),
    *(compare, compared, watch, reference),
)


DIALOGS = (shortcuts, key)
CONTROLS = """(() => {
  window.controls = [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [tabindex='0']"
  )].filter((each) => each.checkVisibility({ visibilityProperty: true }) && !each.disabled);
  window.reached = new Set();
  document.querySelector(".skip").focus();
})()"""
REACH = """(() => {
  const own = document.activeElement;
  const isKnown = reached.has(own);
  reached.add(own);
  const isOutlined = [own, own.closest(".composer") ?? own]
    .some((box) => getComputedStyle(box).outlineStyle !== "none");
  const { width, height } = own.getBoundingClientRect();
  return [isKnown, own === document.body || (isOutlined && width * height > 0), own.outerHTML];
})()"""
MISSED = "controls.filter((each) => !reached.has(each)).map((each) => each.outerHTML.slice(0, 200))"
FOCUSED = "document.activeElement.getAttribute('aria-label')"
MOVING = """document.getAnimations().map(({ effect }) => effect.target.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def axe() -> str:
    return axe_script()


@pytest.fixture(autouse=True)
def answers_with_markdown(engine: ScriptedEngine) -> None:
    """Answer with all kinds of markdown; in a comparison, with two answers."""
    engine.script = lambda generate: text_reply(
        ANSWER if generate.params.temperature < 1 else ANSWER.replace("apple", "pear"),
        size=20,
        marked=True,
    )


def violations_by_scheme(page: Page, axe: str) -> dict[str, list[str]]:
    """Return what axe-core finds in the light and in the dark colours of a page."""
    found = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no colour is half way
        if faults := violations(page, axe):
            found[scheme] = faults
    return found


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(visit: Visitor, axe: str, size: tuple[int, int]) -> None:
    found = {}
    for view in VIEWS:
        if faults := violations_by_scheme(view(visit(size=size)), axe):
            found[view.__name__] = faults
    assert found == {}


def test_axe_finds_nothing_in_the_dialog_of_models(
    library: tuple[ScriptedLibrary, GatewayProcess], visit: Visitor, axe: str
) -> None:
    _, gateway = library
    for size in (DESKTOP, PHONE):
        page = visit(gateway.url, size=size).open()
        page.get_by_role("button", name="Models").click()
        page.locator("dialog .library-row").first.wait_for()
        assert violations_by_scheme(page, axe) == {}


@pytest.mark.parametrize("view", [each for each in VIEWS if each not in DIALOGS])
def test_the_tab_key_reaches_every_control_and_shows_where_it_is(
    visit: Visitor, view: Callable[[Visit], Page]
) -> None:
    page = view(visit())
    page.evaluate(CONTROLS)
    page.keyboard.press("Shift+Tab")  # one before the first
    for _ in range(2000):
        page.keyboard.press("Tab")
        is_known, is_seen, element = page.evaluate(REACH)
        assert is_seen, element
        if is_known and not page.evaluate(MISSED):
            break
        assert not is_known or element.startswith("<body"), f"the focus stays at {element}"
    assert page.evaluate(MISSED) == []


@pytest.mark.parametrize("name", ["Keyboard shortcuts", "Enter an API key"])
def test_a_dialog_keeps_the_focus_and_returns_it(visit: Visitor, name: str) -> None:
    page = chat(visit())
    page.get_by_role("button", name=name).focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    for _ in range(6):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('dialog, body').tagName") in (
            "DIALOG",
            "BODY",  # the browser's own controls come between
        )
        assert page.evaluate("!document.activeElement.closest('.bar, main')")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.evaluate(FOCUSED) == name


def test_nothing_moves_in_any_view_if_the_visitor_wants_no_motion(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    for view in VIEWS:
        page = view(visit(options={"reduced_motion": "reduce"}))
        assert page.evaluate(MOVING) == [], view.__name__
    engine.is_paused = True
    page = chat(visit(options={"reduced_motion": "reduce"}))
    send(page, "hi")
    page.locator(".waiting").wait_for()
    page.locator(".conversations .dot").wait_for()
    assert page.evaluate(MOVING) == []
    page.keyboard.press("Escape")


@pytest.mark.parametrize("width", [640, 320])
def test_a_page_that_is_zoomed_scrolls_in_one_direction_only(visit: Visitor, width: int) -> None:
    """A window of 1280 px has 640 px at a zoom of 200 %, and 320 px at 400 %."""
    for view in VIEWS:
        page = view(visit(size=(width, 512), options={"device_scale_factor": 1280 // width}))
        assert not is_wider_than_screen(page), view.__name__
        wide = page.evaluate("""[...document.querySelectorAll("main, .tab, .page, dialog")]
            .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.className)""")
        assert wide == [], view.__name__


def assert_tree(element: Locator, tree: str) -> None:
    """Fail if a part of the page has not this part of an accessibility tree."""
    from playwright.sync_api import expect

    expect(element).to_match_aria_snapshot(tree)


def test_a_screen_reader_finds_the_parts_of_the_page_and_of_a_conversation(visit: Visitor) -> None:
    page = answers(visit())
    assert_tree(
        page.locator("body"),
        """
      - banner:
        - navigation "Parts of this page":
          - link "Chat"
          - link "Compare"
          - link "Watch"
          - link "Reference"
      - main:
        - heading "Chat" [level=1]
        - complementary "Conversations":
          - list:
            - listitem:
              - button "Name three fruits."
        - combobox "Model"
        - heading "Messages" [level=2]
        - log "Conversation":
          - article "You"
          - article "Answer":
            - group: /Reasoning/
            - heading "Fruits" [level=3]
            - list:
              - listitem: apple
            - region "Table":
              - table:
                - rowgroup:
                  - row "fruit colour"
        - textbox "Message"
        - button "Send"
      - status
    """,
    )


def test_a_screen_reader_finds_the_parts_of_the_other_views(visit: Visitor) -> None:
    visitor = visit()
    assert_tree(
        compared(visitor).locator("main"),
        """
      - heading "Compare" [level=1]
      - textbox "Prompt"
      - textbox "Seed"
      - button "Compare"
      - region "A":
        - combobox "Model of A"
        - region "Answer of A"
      - region "B":
        - combobox "Model of B"
        - region "Answer of B"
      - table
    """,
    )
    assert_tree(
        watch(visitor).locator("main"),
        """
      - heading "Watch" [level=1]
      - status: /Live/
      - button "Pause"
      - region "scripted":
        - heading "Slots and queue" [level=3]
        - img /slots used/
        - heading "Steps" [level=3]
      - region "Requests":
        - textbox "Why was this request slow?"
        - button "Explain"
    """,
    )
    assert_tree(
        reference(visitor).locator("main"),
        """
      - navigation "Routes":
        - searchbox "Search routes and fields"
        - list:
          - listitem:
            - link "POST /v1/chat/completions"
      - heading /Tidegate/ [level=1]
      - heading "OpenAI" [level=2]
    """,
    )
