"""Measures how long the web page is busy while it opens and scrolls a list of conversations.

    python -m tests.benchmarks.conversation_list [--conversations 500] [--messages 20] [--rounds 3]

The conversations are stored in the browser, as the page does. Then the page is opened, and its list
is scrolled from the first to the last conversation. The result is the longest task of the page's
thread in each part, in milliseconds of CPU time, which other programs on the machine change little.
While a task lasts, no frame is drawn, and no key is handled.

This is a measurement, not a test.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.support.browser import Visit, chromium, store_conversations
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, thinking_card

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TASKS = ["toplevel", "disabled-by-default-devtools.timeline"]
"""Categories of trace events that have one event for each task of a thread."""
SETTLE_MS = 1000
SCROLL = """async () => {
  const list = document.querySelector(".conversations");
  const frame = () => new Promise(requestAnimationFrame);
  let before = -1;
  while (list.scrollTop !== before) {
    before = list.scrollTop;
    list.scrollTop += 300;
    await frame();
    await frame();
  }
}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--messages", type=int, default=20, help="messages of each")
    parser.add_argument("--chars", type=int, default=500, help="characters of each message")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        address = f"ipc://{folder}/engine.sock"
        with (
            ScriptedEngine(address, card=thinking_card()) as engine,
            GatewayProcess(engine=engine.address, file_store="none", log_requests=False) as gateway,
            Visit(browser, gateway.await_ready().url) as visit,
        ):
            page = visit.open()
            text = ("word " * options.chars)[: options.chars]
            store_conversations(
                page, options.conversations, num_messages=options.messages, text=text
            )
            rounds = [measure(browser, visit) for _ in range(options.rounds)]
            num_elements = page.evaluate("document.querySelectorAll('*').length")
    print(f"{options.conversations} conversations of {options.messages} messages")
    for part in rounds[0]:
        print(f"{part:7} longest task {median(each[part] for each in rounds):5.0f} ms")
    print(f"{num_elements} elements at the end")
    return 0


def measure(browser: Browser, visit: Visit) -> dict[str, float]:
    """Return the longest task while the page opens, and while its list scrolls."""
    page = visit.page

    def opened() -> None:
        visit.open()
        page.locator(".conversations li").nth(20).wait_for(state="attached")
        page.wait_for_timeout(SETTLE_MS)

    page.goto("about:blank")
    return {
        "open": longest_task_ms(browser, visit, opened),
        "scroll": longest_task_ms(browser, visit, lambda: page.evaluate(SCROLL)),
    }


def longest_task_ms(browser: Browser, visit: Visit, action: Callable[[], None]) -> float:
    """Return the CPU time of the longest task of a page's thread during an action."""
    browser.start_tracing(page=visit.page, categories=TASKS)
    action()
    events: list[dict[str, Any]] = json.loads(browser.stop_tracing())["traceEvents"]
    mains = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    times = [
        event.get("tdur", 0)
        for event in events
        if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) in mains
    ]
    return max(times, default=0) / 1000


if __name__ == "__main__":
    raise SystemExit(main())
