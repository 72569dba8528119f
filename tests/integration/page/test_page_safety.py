"""The web page shows hostile text as text, keeps the API key to itself, and asks no other host.

Each `Visit` also checks that nothing is written to the console as an error, that no request goes to
another host, and that the content security policy is not violated.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.browser import await_answer, send
from tests.support.gateway_process import GatewayProcess
from tests.support.scenarios import call
from tests.support.scripted_engine import ScriptedEngine, text_reply

ATTACKS = """
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">
<svg onload="window.hacked = 1"><a href="javascript:window.hacked=1">x</a>

# <iframe src="javascript:parent.hacked=1"></iframe>

[one](javascript:window.hacked=1) [two](JaVaScRiPt:window.hacked=1)
[three]( data:text/html,<script>x</script>) [four](vbscript:x) [five](//evil.example/x)
<javascript:window.hacked=1> [six](java\tscript:window.hacked=1)
![picture](http://evil.example/pixel.png) ![x](x" onerror="window.hacked=1)
http://evil.example/"onmouseover="x
[seven](https://evil.example/?q="><script>window.hacked=1</script>)

| <b>cell</b> | <img src=x onerror=window.hacked=1> |
|---|---|
| `<script>window.hacked=1</script>` | [x](javascript:hacked=1) |

```html" onmouseover="window.hacked=1
</code></pre><script>window.hacked = 1</script>
```
done
"""
ALLOWED_IN_THREAD = """
  ARTICLE DIV DETAILS SUMMARY P SPAN A BR H3 H4 H5 H6 UL OL LI BLOCKQUOTE HR TABLE THEAD TBODY
  TR TH TD FIGURE FIGCAPTION PRE CODE BUTTON EM STRONG DEL INPUT LABEL TEXTAREA svg path
"""
KEY = "tg-the-right-key"


@pytest.fixture(scope="module")
def locked(engine: ScriptedEngine) -> Iterator[GatewayProcess]:
    """Yield a gateway that requires a key."""
    with GatewayProcess(engine=engine.address, api_key=[KEY], log_requests=False) as gateway:
        yield gateway.await_ready()


def test_hostile_text_of_the_model_is_only_text(visit: Visitor, engine: ScriptedEngine) -> None:
    hostile = call(
        '<img src=x onerror="window.hacked=1">', {"<b>": "</pre><script>hacked=1</script>"}
    )
    reasoning = "<script>window.hacked = 1</script><img src=x onerror=window.hacked=1>"
    text = f"<think>\n{reasoning}\n</think>\n{ATTACKS}\n{hostile}"
    engine.script = lambda generate: text_reply(text, size=3, marked=True)
    page = visit().open()
    send(page, "<img src=x onerror='window.hacked=1'>")
    await_answer(page, "done")
    for folded in page.locator(".thread summary").all():
        folded.click()
    names = page.evaluate(
        "[...new Set([...document.querySelectorAll('.thread *')].map(e => e.tagName))]"
    )
    assert set(names) <= set(ALLOWED_IN_THREAD.split())
    attributes = page.evaluate(
        "[...document.querySelectorAll('.thread *')].flatMap(e => e.getAttributeNames())"
        ".filter(name => name.startsWith('on') || name === 'style')"
    )
    assert attributes == []
    links = page.locator(".thread a")
    for link in links.all():
        assert (link.get_attribute("href") or "").startswith(
            ("http://evil.example/", "https://evil")
        )
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        assert link.get_attribute("target") == "_blank"
    assert links.count() >= 2
    page.reload()  # the title of the conversation is the hostile question
    page.locator(".conversations .title").wait_for()
    assert page.evaluate("window.hacked") is None


def test_markdown_is_rendered(visit: Visitor) -> None:
    """A formula is shown here as its LaTeX, which is part of the MathML that KaTeX makes."""
    page = visit().open()
    render = """async (text) => {
      const { MarkdownView } = await import("/web/markdown.js");
      const view = new MarkdownView();
      const letters = [...text];
      for (let at = 1; at <= letters.length; at += 1) view.update(letters.slice(0, at).join(""));
      const whole = new MarkdownView();
      whole.update(text);
      const isSet = (element) => [...element.querySelectorAll(".formula.display, span.formula")]
        .every((formula) => formula.querySelector(".katex") || formula.title);
      while (!isSet(view.element) || !isSet(whole.element))
        await new Promise(requestAnimationFrame);
      const html = whole.element.innerHTML;
      if (view.element.innerHTML !== html) throw new Error(`streamed: ${view.element.innerHTML}`);
      for (const formula of whole.element.querySelectorAll(".formula:has(.katex)"))
        formula.replaceChildren(formula.querySelector("annotation").textContent);
      for (const part of whole.element.querySelectorAll(".lines"))
        part.replaceWith(...part.childNodes);
      return [...whole.element.children].map((group) => group.innerHTML).join("")
        .replace(/<button.*?<.button>/g, "")
        .replace(/ (target|rel|tabindex|role|aria-label|class|data-last)="[^"]*"/g, "");
    }"""
    for text, html in MARKDOWN:
        assert page.evaluate(render, text) == html, text


FORMULAS = {
    r"$$\int_0^1 x\,dx$$": r"\int_0^1 x\,dx",
    r"$a_1*b_2*c\_d$": r"a_1*b_2*c\_d",
    r"\(x\!\! = \#1 \_ 2\)": r"x\!\! = \#1 \_ 2",
    r"\[\left\{ a_i \right\}\]": r"\left\{ a_i \right\}",
    r"$E=mc^2$": "E=mc^2",
}
"""Formulas as models write them, in all four ways, and their LaTeX, which is not markdown."""
MARKDOWN = [
    ("plain", "<p>plain</p>"),
    ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
    ("# One\n## Two ##\n#not", "<h3>One</h3><h4>Two</h4><p>#not</p>"),
    (
        "*a* **b** ***c*** ~~d~~ _e_ __f__",
        "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong> "
        "<del>d</del> <em>e</em> <strong>f</strong></p>",
    ),
    ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
    (
        "*a **b** c* and **a *b***",
        "<p><em>a <strong>b</strong> c</em> and <strong>a <em>b</em></strong></p>",
    ),
    (r"\*no\* `*code*` ``a ` b``", "<p>*no* <code>*code*</code> <code>a ` b</code></p>"),
    ("**a `**` b**", "<p><strong>a <code>**</code> b</strong></p>"),
    ("**never closed", "<p>**never closed</p>"),
    (
        "- a\n- b\n  - c\n    - d\n- e",
        "<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>",
    ),
    ("3. a\n4. b\n\n   more", '<ol start="3"><li>a</li><li><p>b</p><p>more</p></li></ol>'),
    (
        "1. a\n   ```text\n   x = 1\n\n     y\n   ```\n2. b",
        '<ol start="1"><li><p>a</p><figure><figcaption><span>text</span></figcaption>'
        "<pre><code>x = 1\n\n  y</code></pre></figure></li><li>b</li></ol>",
    ),
    (
        "```\n<b>\n````\nend",
        "<figure><figcaption><span></span></figcaption><pre><code>&lt;b&gt;</code></pre></figure><p>end</p>",
    ),
    (
        "~~~\n```\nopen",
        "<figure><figcaption><span></span></figcaption><pre><code>```\nopen</code></pre></figure>",
    ),
    (
        "- [x] done\n- [ ] open",
        '<ul><li><input type="checkbox" disabled=""> done</li>'
        '<li><input type="checkbox" disabled=""> open</li></ul>',
    ),
    (
        "> a\n> - b\n>> c",
        "<blockquote><p>a</p><ul><li>b</li></ul><blockquote><p>c</p></blockquote></blockquote>",
    ),
    ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
    (
        "|a|b|\n|:-|-:|\n|1|2 \\| 3|\n|4|",
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>"
        "<td>1</td><td>2 | 3</td></tr><tr><td>4</td><td></td></tr></tbody></table></div>",
    ),
    (
        '[a](https://x.org/b_(c) "title") <https://y.org> https://z.org/q_w.',
        '<p><a href="https://x.org/b_(c)">a</a> <a href="https://y.org/">https://y.org</a> '
        '<a href="https://z.org/q_w">https://z.org/q_w</a>.</p>',
    ),
    ("(https://z.org/a)", '<p>(<a href="https://z.org/a">https://z.org/a</a>)</p>'),
    ("[no](javascript:x) [1] [a][b] ](", "<p><span>no</span> [1] [a][b] ](</p>"),
    ("<b>x</b> & <br> y", "<p>&lt;b&gt;x&lt;/b&gt; &amp; <br> y</p>"),
    ("a <- b\n1986. A year", "<p>a &lt;- b<br>1986. A year</p>"),
    *(
        (
            f"**so** {formula} *then*",
            f"<p><strong>so</strong> <span>{tex}</span> <em>then</em></p>",
        )
        for formula, tex in FORMULAS.items()
    ),
    *(
        (f"- *x {formula} y*", f"<ul><li><em>x <span>{tex}</span> y</em></li></ul>")
        for formula, tex in FORMULAS.items()
    ),
    (
        "so\n\\[\na_1*b_2\n- c\\,d\n\\]\nend",
        "<p>so</p><div>a_1*b_2\n- c\\,d</div><p>end</p>",
    ),
    ("$$\n- a\\!b\n$$", "<div>- a\\!b</div>"),
    ("$$\n*a*\\!b", "<div>$$\n*a*\\!b</div>"),
    ("$$\nnot *closed*\n\nend", "<p>$$<br>not <em>closed</em></p><p>end</p>"),
    ("$5 *or* $6, \\$7 *or* $ 8", "<p>$5 <em>or</em> $6, $7 <em>or</em> $ 8</p>"),
    ("$5 and $10, US$1,000-US$2,000, $3.", "<p>$5 and $10, US$1,000-US$2,000, $3.</p>"),
    ("", ""),
]


REPEATED = [
    *("*", "**a", "_a ", "`", "``a`", "[", "[a](", "![", "<", "<http://", "http://a.", "|", "|-"),
    *("> ", "- ", "1. ", "#", " ", "-", "~", "~~~", "```", "\\", "\n", "* *", "a*b_c`"),
    *("\n- a\n  - b\n", "|a|\n|-|\n", "$", "$a ", "$$", "$$\n", "\\(", "\\[\n", "*$a_"),
]
"""Parts of texts whose repetition takes quadratic time in careless renderers."""


def test_no_text_makes_the_page_hang(visit: Visitor) -> None:
    page = visit().open()
    for part in REPEATED:
        length = page.evaluate(
            """async (text) => {
              const { MarkdownView } = await import("/web/markdown.js");
              const view = new MarkdownView();
              view.update(text);
              return view.element.textContent.length;
            }""",
            part * (60_000 // len(part)) + "x",
        )
        assert length > 0


def test_the_key_is_asked_for_used_and_kept_in_the_tab(
    visit: Visitor, engine: ScriptedEngine, locked: GatewayProcess
) -> None:
    visitor = visit(locked.url, refused=(401,))
    page = visitor.open()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("This server requires a key.").wait_for()
    assert dialog.count() == 1
    page.get_by_label("Key", exact=True).fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("The server refused the key: the API key is invalid").wait_for()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_text("tokens", exact=False).first.wait_for()
    send(page, "hi")
    await_answer(page, "Hello, world!")
    assert not any(KEY in address for address in visitor.requests)
    assert page.evaluate("[JSON.stringify(localStorage), document.cookie]") == ["{}", ""]
    page.reload()
    send(page, "again")
    await_answer(page, "Hello, world!")
    page.get_by_role("button", name="Forget the API key").click()
    page.get_by_text("This server requires a key.").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_without_a_key_the_page_says_what_is_missing(
    visit: Visitor, locked: GatewayProcess
) -> None:
    page = visit(locked.url, refused=(401,)).open()
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.locator(".problem").get_by_text(
        "The server needs an API key, and none was entered."
    ).wait_for()
    send(page, "hi")
    page.get_by_role("dialog").wait_for()  # it asks again
    page.keyboard.press("Escape")
    page.locator(".problem").get_by_text("The server needs an API key").wait_for()
    # The notice may still be the first one. The message is given back when the second has failed.
    page.wait_for_function("() => document.querySelector('textarea').value === 'hi'")
    page.keyboard.press("Enter")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    await_answer(page, "Hello, world!")


def test_the_page_works_below_the_path_of_a_proxy(visit: Visitor, gateway: GatewayProcess) -> None:
    """The browser is given a path of its own, which a proxy would remove."""
    visitor = visit()

    def strip(route):
        route.continue_(url=route.request.url.replace("/some/prefix", "", 1))

    visitor.context.route(f"{gateway.url}/some/prefix/**", strip)
    page = visitor.open("/some/prefix/")
    send(page, "hi")
    await_answer(page, "Hello, world!")
    page.get_by_role("link", name="Reference", exact=True).click()
    page.locator("#post_v1_chat_completions").wait_for()
    assert all(address.startswith(f"{gateway.url}/some/prefix/") for address in visitor.requests)
