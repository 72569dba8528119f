"""The chat's list of conversations when there are many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.page.conftest import Visitor
from tests.support.browser import Visit, store_conversations

if TYPE_CHECKING:
    from playwright.sync_api import Page

NUMBER, PIECE = 500, 50
TITLES = "[...document.querySelectorAll('.conversations li:not(.rest) .title')]"
SCROLL = """async () => {
  const list = document.querySelector(".conversations");
  for (let before = -1; list.scrollTop !== before; ) {
    before = list.scrollTop;
    list.scrollTop = list.scrollHeight;
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  }
}"""


def many(visitor: Visit) -> Page:
    page = visitor.open()
    store_conversations(page, NUMBER)
    page.reload()
    page.locator(".conversations li").nth(PIECE).wait_for(state="attached")
    return page


def test_a_long_list_is_drawn_as_far_as_it_is_scrolled(visit: Visitor) -> None:
    page = many(visit())
    assert page.evaluate(f"{TITLES}.length") == PIECE
    assert page.evaluate("document.querySelectorAll('*').length") < 1000
    page.evaluate(SCROLL)
    titles = page.evaluate(f"{TITLES}.map((each) => each.textContent)")
    assert titles == [f"Conversation {number}" for number in range(NUMBER, 0, -1)]
    assert page.locator(".conversations .rest").count() == 0


def test_the_rest_of_a_long_list_is_reached_with_a_keyboard(visit: Visitor) -> None:
    page = many(visit())
    page.get_by_role("button", name=f"Show {PIECE} more").focus()
    page.wait_for_function(f"{TITLES}.length === {2 * PIECE}")
    focused = "document.activeElement.textContent"
    assert page.evaluate(focused) == f"Conversation {NUMBER - PIECE}"


def test_an_open_conversation_is_in_the_list_however_old_it_is(visit: Visitor) -> None:
    visitor = visit()
    many(visitor)
    page = visitor.open("/#chat/stored-3")
    page.locator(".conversations .current", has_text="Conversation 3").wait_for()
    assert page.evaluate(f"{TITLES}.length") == NUMBER - 2
