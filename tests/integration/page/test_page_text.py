"""How the chat shows text: formulas, code and long answers.

Each `Visit` also checks that the files of other projects, which the page loads for that, write no
error, ask no other host, and do not violate the content security policy.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.browser import await_answer, send, set_max_tokens
from tests.support.scripted_engine import ScriptedEngine, text_reply

if TYPE_CHECKING:
    from playwright.sync_api import Browser

INTEGRAL = r"$$\int_0^1 x\,dx$$"


def replies(engine: ScriptedEngine, text: str, size: int = 4) -> None:
    engine.script = lambda generate: text_reply(text, size=size, marked=True)


def test_formulas_are_set_while_an_answer_is_streamed(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, f"The area\n\n{INTEGRAL}\n\nis \\(\\tfrac{{1}}{{2}}\\), for $5 and $10. End.")
    page = visit().open()
    send(page, "Integrate.")
    await_answer(page, "for $5 and $10. End.")
    page.wait_for_function(
        "() => document.querySelectorAll('.answer .formula .katex').length === 2"
    )
    assert page.locator(".formula.display annotation").text_content() == r"\int_0^1 x\,dx"
    assert "$$" not in page.locator(".answer .markdown").inner_text()
    page.wait_for_function("() => document.fonts.check('16px KaTeX_Math')")


def test_katex_is_loaded_for_the_first_formula_only(visit: Visitor, engine: ScriptedEngine) -> None:
    visitor = visit()
    page = visitor.open()
    replies(engine, "It costs $5.")
    send(page, "How much?")
    await_answer(page, "It costs $5.")
    assert not [address for address in visitor.requests if "katex" in address]
    replies(engine, "It is $x$, $y$ and $z$.")
    send(page, "And now?")
    page.wait_for_function(
        "() => document.querySelectorAll('.answer .formula .katex').length === 3"
    )
    scripts = [address for address in visitor.requests if address.endswith("katex.min.js")]
    assert len(scripts) == 1


BROKEN = [r"$\frac{1}$", r"$\unknown x$", r"$$\left( x$$", r"$\gdef\x{\x\x}\x$", "$x^y^z$"]


@pytest.mark.parametrize("source", BROKEN)
def test_a_broken_formula_is_shown_as_its_source(
    visit: Visitor, engine: ScriptedEngine, source: str
) -> None:
    page = visit().open()
    replies(engine, f"so {source} and $x$ end")
    send(page, "What?")
    await_answer(page, "end")
    page.locator(".formula .katex").wait_for()
    broken = page.locator(".formula.broken")
    assert broken.inner_text() == source
    assert broken.get_attribute("title")


HOSTILE = r"""
$\href{javascript:window.hacked=1}{x}$ $\url{https://evil.example/}$
$\includegraphics{https://evil.example/x.png}$ $\htmlId{main}{x}$ $\htmlClass{dialog}{x}$
$\htmlStyle{position:fixed}{x}$ $\htmlData{onclick=hacked}{x}$ $\errmessage{x}$ $\show\x$
$\vec{x}$ $\overrightarrow{AB}$ $\fcolorbox{red}{yellow}{x}$ $\pmb{x}$ $\rule{900em}{900em}$
$\def\a{x}\gdef\vec{\a}$ $\vec{x}$
"""


def test_a_hostile_formula_can_do_nothing(visit: Visitor, engine: ScriptedEngine) -> None:
    """No violation of the content security policy: styles are properties, not attributes."""
    page = visit().open()
    replies(engine, HOSTILE + "\nend")
    send(page, "Attack.")
    await_answer(page, "end")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.answer .formula')]"
        ".every(each => each.querySelector('.katex') || each.title)"
    )
    assert page.locator(".answer .formula :is(a, img, [id], [onclick], .dialog)").count() == 0
    assert page.evaluate("window.hacked") is None
    boxes = page.evaluate(
        "[...document.querySelectorAll('.formula .katex-rule')].map(e => e.offsetHeight)"
    )
    assert boxes
    assert max(boxes) < 600
    arrows = page.locator(".formula annotation", has_text=r"\vec{x}")
    assert arrows.count() == 2
    assert page.locator(".formula .katex-overlay").count() == 2


def test_a_formula_that_grows_is_shown_as_its_source_until_its_end(visit: Visitor) -> None:
    """Each formula changes once, from its source to its layout, and then stays."""
    page = visit().open()
    shown = page.evaluate(
        r"""async () => {
          const { MarkdownView } = await import("/web/markdown.js");
          const first = new MarkdownView();
          document.querySelector("main").append(first.element);
          first.update("$x$");
          while (!first.element.querySelector(".katex"))
            await new Promise(requestAnimationFrame);
          const view = new MarkdownView();
          const text = "so\n\n$$\na_1*b_2*\n\\frac{1}{2}\n$$\n\nand $c_1 d_2$ is";
          const shown = [];
          for (let at = 1; at <= text.length; at += 1) {
            view.update(text.slice(0, at));
            await new Promise(requestAnimationFrame);
            const { element } = view;
            shown.push([
              element.querySelectorAll(".katex").length,
              element.querySelectorAll("em").length + element.querySelectorAll("br").length,
            ]);
          }
          return shown;
        }"""
    )
    assert [number for number, _ in shown] == sorted(number for number, _ in shown)
    assert shown[-1] == [2, 0]
    assert max(marks for _, marks in shown) == 0, "no part of a formula is taken for markdown"


CODE = '''```python
@dataclass
class Point:
    """A point."""
    x: int = 31  # a comment

    def norm(self, scale=1.5):
        return f"{self.x * scale}" + str(None)
```

```diff
-old
+new
```

```nonsense
x = 1
```
'''


def test_code_has_colours_that_can_be_read(visit: Visitor, engine: ScriptedEngine) -> None:
    """Text has a contrast of 4.5 to 1 in both themes (WCAG 2.2, 1.4.3)."""
    replies(engine, CODE + "\nend")
    visitor = visit()
    page = visitor.open()
    assert not [address for address in visitor.requests if "highlight" in address]
    send(page, "Write code.")
    await_answer(page, "end")
    page.locator(".hl-deletion").wait_for()
    page.locator(".hl-keyword").first.wait_for()
    assert page.locator(".answer pre").all_inner_texts() == re.findall(
        r"```\w+\n([^`]+)\n```", CODE
    )
    for theme in ("light", "dark"):
        page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        colours = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll(".answer [class^=hl-]")].map(
              (part) => [part.className, [getComputedStyle(part).color,
                getComputedStyle(part.closest("figure")).backgroundColor]]))"""
        )
        assert {"hl-keyword", "hl-string", "hl-number", "hl-comment", "hl-title"} <= set(colours)
        low = {name: pair for name, pair in colours.items() if contrast(*pair) < 4.5}
        assert low == {}, theme


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, written as "rgb(1, 2, 3)"."""
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


RENDER = """async ([text, step]) => {
  const { MarkdownView } = await import("/web/markdown.js");
  const settle = () => new Promise((done) => setTimeout(done, 600));
  const view = new MarkdownView();
  let rendered = 0; // letters of the nodes that were made
  const watch = new MutationObserver((changes) => {
    for (const { addedNodes } of changes)
      for (const node of addedNodes) rendered += node.textContent.length;
  });
  watch.observe(view.element, { childList: true, subtree: true, characterData: true });
  for (let at = step; at < text.length + step; at += step) {
    view.update(text.slice(0, at));
    await null; // so that the observer sees each change
  }
  await settle();
  watch.disconnect();
  const whole = new MarkdownView();
  whole.update(text);
  await settle();
  return [view.element.innerHTML, whole.element.innerHTML, rendered / text.length];
}"""
PARTS = {
    "paragraphs": "Some *words* of a `paragraph`, with **more** of them.\n\n",
    "items": "- an item with some words\n",
    "loose items": "1. an item with some words\n\n   and a second paragraph\n\n",
    "rows": "| a cell | another cell | a third one |\n",
    "code": "x = call(1, 'text')  # a comment\n",
}
STARTS = {"rows": "| a | b | c |\n|---|---|---|\n", "code": "```python\n"}


@pytest.mark.parametrize("kind", PARTS)
def test_a_long_answer_costs_work_in_proportion_to_its_length(visit: Visitor, kind: str) -> None:
    """Finished parts are not rendered again. A part is rendered about as often as pieces of it
    arrive, and code as often as it has grown by a quarter."""
    page = visit().open()
    factors = {}
    for times in (50, 400):
        text = STARTS.get(kind, "") + PARTS[kind] * times
        streamed, whole, factors[times] = page.evaluate(RENDER, [text, 10])
        assert streamed == whole
    assert factors[400] < 2 * factors[50]
    assert factors[400] < 20


STREAM = """async (parts) => {
  const { MarkdownView } = await import("/web/markdown.js");
  const view = new MarkdownView();
  document.querySelector("main").append(view.element);
  let shown = "";
  for (const part of parts) {
    view.update((shown += part));
    view.element.lastElementChild.lastElementChild.scrollIntoView({ block: "end" });
    await new Promise(requestAnimationFrame);
  }
  return view.element.querySelectorAll("*").length;
}"""


def test_the_elements_of_a_finished_part_are_not_styled_again(
    visit: Visitor, browser: Browser
) -> None:
    """Neither when another part follows, nor when another group of parts begins."""
    page = visit().open()
    parts = [f"{'`word` *word* ' * 20} {number}\n\n" for number in range(100)]
    browser.start_tracing(page=page, categories=["devtools.timeline"])
    num_elements = page.evaluate(STREAM, parts)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    num_styled = sum(
        event["args"]["elementCount"] for event in events if event["name"] == "UpdateLayoutTree"
    )
    assert num_elements > 4000
    assert num_elements <= num_styled < 1.5 * num_elements


LINES = "".join(f"x{number} = call({number})  # comment\n" for number in range(1200))
SELECTED = (
    "part => { getSelection().selectAllChildren(part); return getSelection().toString().trim(); }"
)


@pytest.mark.parametrize("language", ["", "python"])
def test_long_code_is_laid_out_in_parts_and_copied_as_a_whole(
    visit: Visitor, language: str
) -> None:
    """The coloured part is longer than the others, but does not grow any more."""
    page = visit().open()
    page.evaluate(STREAM, [f"```{language}\n", *LINES.splitlines(keepends=True), "```\n"])
    if language:
        page.locator(".hl-comment").first.wait_for()
    parts = page.locator("pre .lines").all_text_contents()
    assert "".join(parts) == LINES.rstrip()
    assert max(map(len, parts[1:])) < 4100
    assert language == "" or parts[0].count("#") == page.locator(".hl-comment").count()
    assert page.locator("pre").evaluate(SELECTED) == LINES.rstrip()


def test_long_reasoning_is_laid_out_in_parts_and_copied_as_a_whole(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, f"<think>\n{LINES}</think>\n\nThe end.", size=97)
    page = visit().open()
    set_max_tokens(page, 100_000)
    send(page, "Think.")
    await_answer(page, "The end.")
    page.get_by_text("Reasoning", exact=True).click()
    parts = page.locator(".thought .lines").all_text_contents()
    assert "".join(parts).strip() == LINES.rstrip()
    assert max(map(len, parts)) < 4100
    assert page.locator(".thought").evaluate(SELECTED) == LINES.rstrip()


def test_an_answer_is_drawn_once_in_each_frame(visit: Visitor) -> None:
    """In a hidden tab, which has no frames, it is drawn now and then."""
    visitor = visit()
    visitor.page.clock.install()
    page = visitor.open()
    page.evaluate(
        """async () => {
          const { oncePerFrame } = await import("/web/dom.js");
          window.drawn = [];
          let numFrames = 0;
          const count = () => { numFrames += 1; requestAnimationFrame(count); };
          count();
          const draw = oncePerFrame(() => window.drawn.push(numFrames));
          setInterval(draw, 1);
        }"""
    )
    page.clock.run_for(1000)
    drawn = page.evaluate("window.drawn")
    assert len(drawn) > 50
    assert len(set(drawn)) == len(drawn)
    page.evaluate("window.requestAnimationFrame = () => 0; window.drawn = []")
    page.clock.run_for(1000)
    assert 3 <= page.evaluate("window.drawn.length") <= 5


def test_long_lines_are_wrapped_in_all_blocks_until_the_button_is_pressed_again(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, f"```\n{'word ' * 100}\n```\n\n```\n{'x' * 500}\n```\n\nend")
    page = visit().open()
    send(page, "Write code.")
    await_answer(page, "end")
    wide = "() => [...document.querySelectorAll('pre')].map(e => e.scrollWidth > e.clientWidth)"
    assert page.evaluate(wide) == [True, True]
    buttons = page.get_by_role("button", name="Wrap")
    buttons.first.click()
    assert page.evaluate(wide) == [False, False]
    assert [each.get_attribute("aria-pressed") for each in buttons.all()] == ["true", "true"]
    page.reload()
    page.locator(".conversations .title").click()
    buttons.first.wait_for()
    assert page.evaluate(wide) == [False, False]
    buttons.last.click()
    assert page.evaluate(wide) == [True, True]
    assert page.evaluate("() => JSON.stringify(localStorage)") == "{}"


def test_the_end_of_a_long_answer_stays_in_sight(visit: Visitor, engine: ScriptedEngine) -> None:
    """Parts far from the window have an estimated height until they are seen."""
    parts = [f"Paragraph {number}\n\n$$\\frac{{{number}}}{{2}}$$\n\n" for number in range(200)]
    replies(engine, "".join(parts) + "The end.", size=40)
    page = visit().open()
    set_max_tokens(page, 100_000)
    send(page, "Write.")
    await_answer(page, "The end.")
    at_end = """() => {
      const { scrollHeight, scrollTop, clientHeight } = document.querySelector(".thread");
      return scrollTop > 1000 && scrollHeight - scrollTop - clientHeight < 3;
    }"""
    page.wait_for_function(at_end)
    page.reload()
    page.get_by_text("The end.").wait_for()
    page.wait_for_function(at_end)
    page.locator(".thread").evaluate("thread => (thread.scrollTop = 0)")
    page.get_by_text("Paragraph 0", exact=True).wait_for()
    page.get_by_role("button", name="Scroll to the end").click()
    page.wait_for_function(at_end)
