"""Measures the frames of the web page while a long answer is streamed into it.

    python -m tests.benchmarks.page_frames [--tokens 50000] [--per-second 1000] [--kind mixed]

The browser is a real Chromium without a screen, and the gateway is real. The engine is a script
that sends 4 letters for each token. Kinds of answers: `mixed` (sections with text, formulas, lists,
tables and code), `paragraphs`, `list`, `table`, `code`, and `line`, which never ends its line.

The result has the CPU time of the browser's main thread in its tasks, from a trace. A frame is at
most one task: scripts, styles, layout and what is recorded for painting. CPU time does not count
what other programs do on the machine meanwhile. The intervals between frames, which are printed as
well, do.

This is a measurement, not a test. The work is counted in
tests/integration/page/test_page_text.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.support.browser import DESKTOP, chromium, send, set_max_tokens
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, text_reply, thinking_card

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOKEN_CHARS = 4
MAX_TOKENS = 1_000_000
"""The scripted model has a token for each byte."""
FRAME_MS = 50.0
"""A longer frame is seen as a stutter."""
LAST = "This is the last line."
TASK = "RunTask"
CATEGORIES = ["disabled-by-default-devtools.timeline", "__metadata"]

WATCH_FRAMES = """() => {
  window.gaps = [];
  let last = performance.now();
  const next = (now) => {
    window.gaps.push(now - last);
    last = now;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}"""


def section(number: int) -> str:
    return rf"""## Section {number}

The tide of day {number} is **higher** than the *one before*, as `height({number})` shows. It rises
with $h_{{{number}}} = \frac{{a_{{{number}}}}}{{2}}$ for some hours, and then it falls again.

$$\int_0^{{{number}}} x\,dx = \frac{{{number}^2}}{{2}}$$

1. The moon is at {number} degrees.
2. The sun is at {number * 7 % 360} degrees.
   - Both pull at the water.

| hour | height | change |
|---|---:|---:|
| {number % 24} | {number / 7:.2f} m | {number % 5 - 2} cm |
| {(number + 6) % 24} | {number / 9:.2f} m | {number % 3 - 1} cm |

```python
def height(hour: int) -> float:
    '''Return the height of day {number}.'''
    return {number} * math.cos(hour / 12.42 * math.tau)  # in metres
```

"""


KINDS: dict[str, tuple[str, Callable[[int], str]]] = {
    "mixed": ("", section),
    "paragraphs": ("", lambda n: f"Paragraph {n} has **some** words, and a `little` code.\n\n"),
    "list": ("", lambda n: f"{n + 1}. The item {n} has *some* words.\n"),
    "table": ("| a | b |\n|---|---|\n", lambda n: f"| {n} | the row {n} |\n"),
    "code": ("```python\n", lambda n: f"x{n} = call({n}, 'text')  # a comment\n"),
    "line": ("", lambda n: f"word{n} "),
}
"""Kind of an answer -> its start, and its part of each number."""


def answer(kind: str, num_chars: int) -> str:
    """Return an answer of about this length."""
    start, part = KINDS[kind]
    text, size = [start], len(start)
    for number in count():
        if size >= num_chars:
            end = "\n```\n\n" if kind == "code" else "\n\n"
            return "".join(text) + end + LAST
        text.append(part(number))
        size += len(text[-1])
    raise AssertionError("count() has no end")


def main_thread_tasks(trace: bytes) -> list[float]:
    """Return the CPU milliseconds of each task of the page's main thread.

    trace    a trace of Chromium, as JSON
    """
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    of_thread: dict[tuple[int, int], list[float]] = {thread: [] for thread in threads}
    for event in events:
        thread = (event["pid"], event["tid"])
        if thread in of_thread and event["name"] == TASK and "tdur" in event:
            of_thread[thread].append(event["tdur"] / 1000)
    return max(of_thread.values(), key=sum)


def measure(browser: Browser, gateway: GatewayProcess, wait_s: float) -> None:
    """Stream the answer into a new window, and print what its frames took."""
    context = browser.new_context(viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
    page = context.new_page()
    page.goto(gateway.url)
    page.get_by_text("tokens", exact=False).first.wait_for()
    set_max_tokens(page, MAX_TOKENS)
    page.evaluate(WATCH_FRAMES)
    browser.start_tracing(page=page, categories=CATEGORIES)
    started = time.monotonic()
    send(page, "Write a long answer.")
    page.locator(".message.answer[aria-busy=true]").wait_for()
    page.locator(".message.answer[aria-busy=false]").wait_for(timeout=1000 * wait_s)
    took_s = time.monotonic() - started
    tasks = main_thread_tasks(browser.stop_tracing())
    gaps = page.evaluate("() => window.gaps")
    print(f"streamed in {took_s:.1f} s; {size_of(page)}")
    print(row("CPU time of a task", tasks))
    print(row("time between two frames", gaps))
    context.close()


def size_of(page: Page) -> str:
    """Return the size of the page in words. Fail if the answer is not complete."""
    text = page.locator(".message.answer .markdown").text_content() or ""
    assert text.endswith(LAST), text[-200:]
    number = page.evaluate("() => document.querySelectorAll('.answer .markdown *').length")
    return f"{len(text):,} characters are shown in {number:,} elements"


def row(name: str, values: Sequence[float]) -> str:
    ordered = sorted(values)
    slow = sum(value > FRAME_MS for value in ordered)
    parts = {"median": 0.5, "p99": 0.99, "p99.9": 0.999}
    shown = [f"{label} {ordered[int(len(ordered) * part)]:.1f}" for label, part in parts.items()]
    longest = f"longest {ordered[-1]:.1f}; {slow} of {len(ordered)} over {FRAME_MS:.0f}"
    return f"{name}, ms: {', '.join(shown)}, {longest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--per-second", type=int, default=1000)
    parser.add_argument("--kind", choices=KINDS, default="mixed")
    options = parser.parse_args()
    text = answer(options.kind, options.tokens * TOKEN_CHARS)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        engine = ScriptedEngine(
            f"ipc://{folder}/engine.sock",
            script=lambda generate: text_reply(text, size=TOKEN_CHARS, marked=True),
            card=thinking_card(),
            step_s=1 / options.per_second,
            max_len=1 << 20,
        )
        with engine, GatewayProcess(engine=engine.address, log_requests=False) as gateway:
            gateway.await_ready()
            print(f"{options.kind}: {options.tokens:,} tokens, {options.per_second:,} per second")
            measure(browser, gateway, wait_s=60 + 10 * options.tokens / options.per_second)


if __name__ == "__main__":
    main()
