"""How the chat shows text: formulas, code and long answers.

Each `Visit` also checks that the files of other projects, which the page loads for that, write no
error, ask no other host, and do not violate the content security policy.
"""

from __future__ import annotations

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.browser import await_answer, send
from tests.support.scripted_engine import ScriptedEngine, text_reply

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
    page.wait_for_function("document.querySelectorAll('.answer .formula .katex').length === 2")
    assert page.locator(".formula.display annotation").text_content() == r"\int_0^1 x\,dx"
    assert "$$" not in page.locator(".answer .markdown").inner_text()
    assert page.evaluate("document.fonts.check('16px KaTeX_Math')")


def test_katex_is_loaded_for_the_first_formula_only(visit: Visitor, engine: ScriptedEngine) -> None:
    visitor = visit()
    page = visitor.open()
    replies(engine, "It costs $5.")
    send(page, "How much?")
    await_answer(page, "It costs $5.")
    assert not [address for address in visitor.requests if "katex" in address]
    replies(engine, "It is $x$, $y$ and $z$.")
    send(page, "And now?")
    page.wait_for_function("document.querySelectorAll('.answer .formula .katex').length === 3")
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
        "[...document.querySelectorAll('.answer .formula')]"
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
