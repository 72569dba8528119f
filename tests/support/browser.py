"""A headless Chromium for tests of the web page, and what a page must not do in it.

The browser is Debian's package `chromium-headless-shell`, or `chromium`, with which the tests take
half as long again. Playwright, a Python package, drives it. Tests that need them are skipped if one
is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.support.waiting import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--no-sandbox", "--disable-dev-shm-usage")
"""Chromium refuses its sandbox to root, and containers have a small /dev/shm."""
DESKTOP, PHONE = (1280, 800), (390, 844)
_LISTEN = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""
_NEXT_FRAME = """
() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))
"""
_STORED = """async ([title, text]) => {
  const done = (request) =>
    new Promise((resolve) => (request.onsuccess = () => resolve(request.result)));
  const database = await done(indexedDB.open("tidegate"));
  const store = database.transaction("conversations").objectStore("conversations");
  const found = await done(store.getAll());
  database.close();
  return found.some(({ conversation }) =>
    conversation.title === title && conversation.messages.some(({ content }) => content === text));
}"""

_STORE = """async ([number, length, text]) => {
  const done = (request) =>
    new Promise((resolve) => (request.onsuccess = () => resolve(request.result)));
  const database = await done(indexedDB.open("tidegate"));
  const store = database.transaction("conversations", "readwrite").objectStore("conversations");
  for (let used = number; used > 0; used -= 1) {
    const messages = Array.from({ length }, (_, place) => ({
      id: `${used}-${place}`, role: place % 2 ? "assistant" : "user", content: text, reasoning: "",
      calls: [], finish: "stop", tokens: 9, model: "scripted", settings: {},
    }));
    const id = `stored-${used}`;
    const conversation =
      { id, title: `Conversation ${used}`, model: "scripted", settings: {}, messages, used };
    await done(store.put({ id, used, bytes: 2 * length * text.length, conversation }));
  }
  database.close();
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser. Skip the test if there is no Chromium or no Playwright.

    While it runs, this thread has an asyncio event loop, so it must end before tests that have one
    of their own.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs Chromium: apt install chromium-headless-shell")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, from the extra test")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(OPTIONS))
        yield browser
        browser.close()


@dataclass
class Visit:
    """One visitor of the page: a browser window with its own storage.

    url       address of the server
    problems  what the page must not do: errors in the console, requests to other hosts, and
              violations of the content security policy
    refused   statuses that the server may answer with. The browser writes each into the console
    """

    browser: Browser
    url: str
    size: tuple[int, int] = DESKTOP
    options: dict[str, Any] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        width, height = self.size
        self.context: BrowserContext = self.browser.new_context(
            viewport={"width": width, "height": height}, accept_downloads=True, **self.options
        )
        self.context.set_default_timeout(HANG_S * 1000)
        self.context.add_init_script(_LISTEN)
        self.context.on("request", lambda request: self._on_request(request.url))
        self.context.on("weberror", lambda error: self.problems.append(str(error.error)))
        self.context.on("console", self._on_console)
        self.page: Page = self.context.new_page()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.context.close()

    def check(self) -> None:
        """Fail if the page has done something that it must not do."""
        self.problems += self.page.evaluate("window.violations")
        assert self.problems == [], "\n".join(self.problems)

    def open(self, path: str = "/") -> Page:
        """Open a part of the page, and wait until it is drawn."""
        self.page.goto(self.url + path)
        self.page.locator("main h1").first.wait_for(state="attached")
        return self.page

    def hold(self, path: str) -> Callable[[], None]:
        """Hold requests to a path of the server, and return a function that lets them go on. A test
        so forces what a fast visitor sees of a slow server."""
        held: list[Route] = []
        is_held = True

        def on_route(route: Route) -> None:
            if is_held:
                held.append(route)
            else:
                route.continue_()

        def release() -> None:
            nonlocal is_held
            is_held = False
            for route in held:
                route.continue_()

        self.context.route(self.url + path, on_route)
        return release

    def _on_request(self, address: str) -> None:
        self.requests.append(address)
        if not address.startswith((self.url + "/", "data:", "blob:")):
            self.problems.append(f"a request to {address}")

    def _on_console(self, message: Any) -> None:
        is_refusal = any(f"status of {status} " in message.text for status in self.refused)
        if message.type in ("error", "warning") and not is_refusal:
            self.problems.append(f"{message.type}: {message.text}")


def await_models(page: Page) -> None:
    """Wait until a new chat knows the models. Before, its settings are not complete."""
    page.locator(".empty .muted").filter(has_text="tokens").wait_for()


def send(page: Page, text: str) -> None:
    """Write a message in the chat and send it."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def set_max_tokens(page: Page, number: int) -> None:
    """Set the most tokens of the answers that follow."""
    settings = page.get_by_role("button", name="Settings", exact=True)
    settings.click()
    page.get_by_label("Max tokens").fill(str(number))
    settings.click()


def await_answer(page: Page, text: str) -> None:
    """Wait until the last answer contains a text and is complete."""
    answer = page.locator(".message.answer").last
    answer.get_by_text(text).first.wait_for()
    page.locator(".message.answer[aria-busy=false]").last.wait_for()


def texts_of(page: Page, selector: str) -> list[str]:
    """Return the texts of the elements that a selector matches, as the page shows them in the next
    frame. Before, the browser has not laid out what an action has drawn, and an answer is empty."""
    page.evaluate(_NEXT_FRAME)
    return page.locator(selector).all_inner_texts()


def await_stored(page: Page, title: str, text: str) -> None:
    """Wait until the browser has stored a conversation with this title and a message of this text.
    A page that is closed earlier may lose its last change."""
    page.wait_for_function(_STORED, arg=[title, text])


def store_conversations(page: Page, number: int, *, num_messages: int = 2, text: str = "x") -> None:
    """Store conversations called "Conversation 1" and so on in the browser, as the page does. The
    last one was used last. The page shows them after it is loaded again."""
    page.evaluate(_STORE, [number, num_messages, text])


def is_wider_than_screen(page: Page) -> bool:
    """Return whether the page scrolls sideways."""
    wide: bool = page.evaluate(
        "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    )
    return wide
