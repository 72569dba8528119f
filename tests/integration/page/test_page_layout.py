"""The web page on a phone, in the dark, with a keyboard alone, and for screen readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.browser import PHONE, await_answer, is_wider_than_screen, send
from tests.support.scripted_engine import ScriptedEngine, text_reply

if TYPE_CHECKING:
    from playwright.sync_api import Page

TABS = ("/", "/#compare", "/reference", "/reference#post_v1_chat_completions")
WIDE = f"""
A long word: {"x" * 120} and https://example.com/{"y" * 120}

```
{"code " * 40}
```

| {" | ".join(f"column {number}" for number in range(12))} |
|{"---|" * 12}
| {" | ".join("value" for _ in range(12))} |

done
"""
UNNAMED = """
[...document.querySelectorAll("button, input, select, textarea, a[href]")].filter((each) => {
  const label = each.getAttribute("aria-label") || each.textContent.trim() || each.title;
  const named = label && !["SELECT", "TEXTAREA"].includes(each.tagName);
  return !(named || each.getAttribute("aria-label") || each.labels?.length);
}).map((each) => each.outerHTML)
"""

FOCUS = """(() => {
  const own = document.activeElement;
  const boxes = [own, own.closest(".composer") ?? own];
  const isOutlined = boxes.some((box) => getComputedStyle(box).outlineStyle !== "none");
  return [own.outerHTML.slice(0, 120), isOutlined && own.getBoundingClientRect().width > 0];
})()"""


def background(page: Page) -> str:
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


def test_a_phone_never_scrolls_sideways(visit: Visitor) -> None:
    visitor = visit(size=PHONE, options={"has_touch": True, "is_mobile": True})
    for path in TABS:
        page = visitor.open(path)
        page.locator("select option, details.operation").first.wait_for(state="attached")
        assert not is_wider_than_screen(page), path


def test_a_wide_answer_scrolls_inside_itself_on_a_phone(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    engine.script = lambda generate: text_reply(WIDE, size=20)
    page = visit(size=PHONE, options={"has_touch": True, "is_mobile": True}).open()
    send(page, "wide " * 100 + "z" * 300)
    await_answer(page, "done")
    assert not is_wider_than_screen(page)
    widths = page.evaluate(
        "[...document.querySelectorAll('.answer > .markdown > *')].map(e => e.offsetWidth)"
    )
    assert max(widths) <= PHONE[0]
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="New conversation").first.click()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Temperature").wait_for()
    assert not is_wider_than_screen(page)


def test_the_theme_follows_the_system_and_can_be_chosen(visit: Visitor) -> None:
    page = visit(options={"color_scheme": "dark"}).open()
    dark = background(page)
    page.get_by_role("button", name="Theme: system").click()
    light = background(page)
    page.reload()
    assert background(page) == light != dark
    page.get_by_role("button", name="Theme: light").click()
    assert background(page) == dark
    page.emulate_media(color_scheme="light")
    assert background(page) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert background(page) == light


def test_a_keyboard_is_enough(visit: Visitor, engine: ScriptedEngine) -> None:
    engine.script = lambda generate: text_reply("word " * 500)
    engine.step_s = 0.01
    page = visit().open()
    page.wait_for_function("() => document.activeElement.id === 'prompt'")
    page.keyboard.type("Count.")
    page.keyboard.press("Enter")
    page.get_by_text("word word").wait_for()
    page.keyboard.press("Escape")
    engine.await_abort(engine.generates[-1].request)
    engine.script = lambda generate: text_reply("Hello again.")
    page.keyboard.press("Alt+r")
    await_answer(page, "Hello again.")
    page.keyboard.press("ArrowUp")
    page.get_by_label("Edit the message").fill("Something else.")
    page.keyboard.press("Enter")
    await_answer(page, "Hello again.")
    assert page.locator(".message.user").inner_text().startswith("Something else.")
    page.keyboard.press("Alt+/")
    page.get_by_role("dialog").get_by_text("Stop the answer").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+n")
    assert page.locator(".message").count() == 0


def test_all_controls_have_names_and_a_visible_focus(visit: Visitor) -> None:
    visitor = visit()
    for path in TABS:
        page = visitor.open(path)
        page.locator("select option, details.operation").first.wait_for(state="attached")
        assert page.evaluate(UNNAMED) == []
        page.evaluate("document.querySelector('.skip').focus()")
        seen = []
        for _ in range(20):
            element, is_seen = page.evaluate(FOCUS)
            assert is_seen or element.startswith("<body"), element
            seen.append(element)
            page.keyboard.press("Tab")
        assert len(set(seen)) > 12, "the focus moves on"


def test_a_finished_answer_is_announced_once(visit: Visitor, engine: ScriptedEngine) -> None:
    page = visit().open()
    page.evaluate(
        """window.said = [];
        const announcer = document.getElementById("announcer");
        new MutationObserver(() => said.push(announcer.textContent))
          .observe(announcer, { childList: true, characterData: true, subtree: true })"""
    )
    send(page, "hi")
    await_answer(page, "Hello, world!")
    page.wait_for_function("() => said.includes('Hello, world!')")
    assert [text for text in page.evaluate("said") if text] == ["Answering.", "Hello, world!"]
    assert page.locator(".thread").get_attribute("aria-live") == "off"


def test_nothing_moves_if_the_visitor_wants_no_motion(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    engine.is_paused = True
    page = visit(options={"reduced_motion": "reduce"}).open()
    send(page, "hi")
    waiting = page.locator(".waiting span").first
    waiting.wait_for()
    assert waiting.evaluate("element => getComputedStyle(element).animationName") == "none"
    page.keyboard.press("Escape")


EDGES = """(selector) => {
  const { left, right } = document.querySelector(selector).getBoundingClientRect();
  return [left, right];
}"""


@pytest.mark.parametrize("width", [1280, 900, 600, 390])
def test_a_message_and_the_field_for_the_next_have_the_same_edges(
    visit: Visitor, engine: ScriptedEngine, width: int
) -> None:
    engine.script = lambda generate: text_reply("A line of text.\n\n" * 60, size=100)
    page = visit(size=(width, 700)).open()
    send(page, "Write.")
    await_answer(page, "A line")
    assert page.locator(".thread").evaluate("each => each.scrollHeight > each.clientHeight")
    assert page.evaluate(EDGES, ".message.answer") == page.evaluate(EDGES, ".composer")


@pytest.mark.parametrize("size", [(1680, 800), (1280, 800), PHONE])
def test_the_pages_have_the_same_column_and_margins(visit: Visitor, size: tuple[int, int]) -> None:
    visitor = visit(size=size)
    found = {}
    for path in ("/#compare", "/#watch"):
        page = visitor.open(path)
        page.locator("select option, .watch-engine").first.wait_for(state="attached")
        left, right = page.evaluate(EDGES, ".page")
        found[path] = (left, right, page.evaluate(EDGES, "main h1")[0])
        assert left == size[0] - right
    assert found["/#compare"] == found["/#watch"]
    page = visitor.open("/reference")
    page.locator("details.operation").first.wait_for()
    left, right = page.evaluate(EDGES, "details.operation")
    body_left, body_right = page.evaluate(EDGES, ".docs-body")
    assert left - body_left == body_right - right
