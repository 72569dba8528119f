"""Measures the frames of the web page while a long answer is streamed into it.

    python -m tests.benchmarks.page_frames [--tokens 50000] [--per-second 1000] [--kind mixed]

The browser is a real Chromium without a screen, and the gateway is real. The engine is a script
that sends 4 letters for each token. Kinds of answers: `mixed` (sections with text, formulas, lists,
tables and code), `paragraphs`, `list`, `table`, `code`, and `line`, which never ends its line.

The result has the CPU time of the browser's main thread in its tasks, from a trace. A frame is at
most one task: scripts, styles, layout and what is recorded for painting. CPU time does not count
what other programs do on the machine meanwhile. The intervals between frames, which are printed as
well, do. The longest tasks are listed with the parts that took most of their time.

Nothing asks the page anything while the answer is streamed: a question of Playwright is a task too.
It searches the whole page for the elements of a locator, which takes 40 ms in a long answer.

This is a measurement, not a test. The work is counted in
tests/integration/page/test_page_text.py.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
SOURCE = "ThreadControllerImpl::RunTask"
"""An event in each task, with the function that has posted the task."""
CATEGORIES = [
    "disabled-by-default-devtools.timeline",
    "devtools.timeline",
    "toplevel",
    "v8",
    "__metadata",
]
NUM_LONGEST = 5
NUM_PARTS, MIN_PART_MS = 4, 1.0

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
AWAIT_END = """(limitMs) => new Promise((done, fail) => {
  const answer = document.querySelector(".message.answer");
  const look = () => answer.getAttribute("aria-busy") === "false" && done();
  setTimeout(() => fail(new Error("the answer has no end")), limitMs);
  new MutationObserver(look).observe(answer, { attributeFilter: ["aria-busy"] });
  look();
})"""


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


@dataclass(slots=True)
class PageTask:
    """A task of the page's main thread.

    at_s      when it began, in seconds since the first one
    cpu_ms    CPU time
    parts_ms  what happened in it -> the CPU time of that, less the time of other parts inside it
    """

    at_s: float
    cpu_ms: float
    parts_ms: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        most = self.parts_ms.most_common(NUM_PARTS)
        parts = [f"{name} {ms:.1f}" for name, ms in most if ms > MIN_PART_MS]
        return f"at {self.at_s:.1f} s: {self.cpu_ms:.1f} ms: {', '.join(parts)}"


def main_thread_tasks(trace: bytes) -> list[PageTask]:
    """Return the tasks of the page's main thread.

    trace    a trace of Chromium, as JSON
    """
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {
        (event["pid"], event["tid"]): []
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    for event in events:
        of_thread = threads.get((event["pid"], event["tid"]))
        if of_thread is not None and "tdur" in event:
            of_thread.append(event)
    each = [tasks_of(of_thread) for of_thread in threads.values()]
    return max(each, key=lambda tasks: sum(task.cpu_ms for task in tasks))


def tasks_of(events: Iterable[dict[str, Any]]) -> list[PageTask]:
    """Return the tasks of a thread, from its events. They contain each other."""
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    tasks: list[PageTask] = []
    around: list[tuple[float, str]] = []  # the ends and names of the events around the next one
    for event in ordered:
        start, cpu_ms = event["ts"], event["tdur"] / 1000
        while around and around[-1][0] <= start:
            around.pop()
        if event["name"] == TASK and not around:
            tasks.append(PageTask(at_s=(start - ordered[0]["ts"]) / 1e6, cpu_ms=cpu_ms))
        elif not around:
            continue  # an event between tasks
        parts_ms = tasks[-1].parts_ms
        if around:
            parts_ms[around[-1][1]] -= cpu_ms
        name = part_name(event)
        parts_ms[name] += cpu_ms
        around.append((start + event["dur"], name))
    return tasks


def part_name(event: dict[str, Any]) -> str:
    """Return what an event is called in the list of the longest tasks."""
    arguments = event.get("args", {})
    if event["name"] == SOURCE:
        words = arguments.get("src_func", "").split("(")[0].split() or ["a function without a name"]
        return f"(posted by {words[-1]} of {arguments.get('src_file')})"
    if event["name"] == "FunctionCall":
        function = arguments.get("data", {}).get("functionName")
        return f"script, {function or 'a function without a name'}"
    return str(event["name"])


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
    page.evaluate(AWAIT_END, 1000 * wait_s)
    took_s = time.monotonic() - started
    tasks = main_thread_tasks(browser.stop_tracing())
    gaps = page.evaluate("() => window.gaps")
    print(f"streamed in {took_s:.1f} s; {size_of(page)}")
    print(row("CPU time of a task", [task.cpu_ms for task in tasks]))
    print(row("time between two frames", gaps))
    for task in heapq.nlargest(NUM_LONGEST, tasks, key=lambda task: task.cpu_ms):
        print(f"  {task}")
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
