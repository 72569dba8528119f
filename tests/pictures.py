"""Takes the pictures of the web page in docs/images, from a server with the default model.

    python -m tests.pictures

It needs Chromium and the default model (tests/support/browser.py, tests/support/model.py). Answers
are greedy, so the pictures change only if the page, the model or the kernels do.
"""

from __future__ import annotations

import struct
import sys
import zlib
from typing import Any

from tests.support.browser import PHONE, Visit, chromium, send
from tests.support.processes import ROOT
from tests.support.server import Server

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 150_000
SIZE, TALL = (1180, 780), (1180, 960)
QUESTION = "Write a short Python function that returns the mean of a list of numbers. Explain it."


def main() -> int:
    IMAGES.mkdir(exist_ok=True)
    with Server("--served-name", "smollm2-135m") as server, chromium() as browser:
        for name, options, draw in PICTURES:
            with Visit(browser, server.url, **options) as visit:
                draw(visit)
                path = IMAGES / f"page-{name}.png"
                path.write_bytes(smaller(visit.page.screenshot()))
                print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
                if path.stat().st_size > MAX_BYTES:
                    print(f"it is larger than {MAX_BYTES:,} bytes", file=sys.stderr)
                    return 1
    return 0


def draw_chat(visit: Visit) -> None:
    page = visit.open()
    page.keyboard.press("Alt+s")
    page.get_by_label("Temperature").fill("0")
    for text in ("Name three fruits.", "What is a tide?"):
        ask(visit, text, 60)
        page.keyboard.press("Alt+n")
    ask(visit, QUESTION, 220)
    page.keyboard.press("Alt+s")


def ask(visit: Visit, text: str, max_tokens: int) -> None:
    visit.page.get_by_label("Max tokens").fill(str(max_tokens))
    send(visit.page, text)
    await_end(visit)


def await_end(visit: Visit) -> None:
    """Wait until the first answer of the conversation is complete."""
    visit.page.locator(".message.answer[aria-busy=false]").get_by_role(
        "button", name="Copy"
    ).first.wait_for()


def draw_tokens(visit: Visit) -> None:
    page = visit.open()
    page.keyboard.press("Alt+s")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Show the probability of each token").check()
    ask(visit, "Why does the sea have tides?", 70)
    page.locator(".tokens span").nth(12).hover()


def draw_phone(visit: Visit) -> None:
    page = visit.open()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("220")
    page.get_by_role("button", name="Close the settings").click()
    send(page, QUESTION)
    await_end(visit)


def draw_compare(visit: Visit) -> None:
    page = visit.open("/#compare")
    for name, temperature in (("A", "0.2"), ("B", "0.9")):
        side = page.get_by_role("region", name=name, exact=True)
        side.locator("summary").first.click()
        side.get_by_label("Temperature").fill(temperature)
        side.locator("summary").first.click()
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Max tokens").fill("60")
    page.get_by_label("Prompt").fill("What is a tide?")
    page.get_by_label("Prompt").press("Enter")
    page.get_by_text("The answers differ").first.wait_for()
    page.get_by_role("button", name="Compare", exact=True).wait_for()


def draw_watch(visit: Visit) -> None:
    page = visit.open()
    page.evaluate(KEEP_ASKING, QUESTION)
    page.get_by_role("link", name="Watch").click()
    page.wait_for_function(
        "() => document.querySelectorAll('.watch-steps .decode').length > 80", timeout=120_000
    )


KEEP_ASKING = """(question) => {
  const ask = async (place, turn) => {
    const content = `${place}. ${question} `.repeat(1 + ((place + turn) % 5) * 6);
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Request-Id": `chat-${place}-${turn}` },
      body: JSON.stringify({
        messages: [{ role: "user", content }], ignore_eos: true, max_tokens: 60 + 40 * place,
      }),
    });
    await response.text();
    ask(place, turn + 1);
  };
  for (let place = 0; place < 4; place += 1) ask(place, 0);
}"""
"""Four clients that ask one question after another, with prompts of several lengths."""


def draw_docs(visit: Visit) -> None:
    page = visit.open("/reference#post_v1_completions")
    form = page.locator("#post_v1_completions form.try")
    form.get_by_role("button", name="Send").click()
    form.get_by_text("200 OK").wait_for()
    page.evaluate("document.activeElement.blur()")


DARK: dict[str, Any] = {"options": {"color_scheme": "dark"}}
PICTURES = (
    ("chat", {"size": (1180, 850)}, draw_chat),
    ("chat-dark", {"size": SIZE, **DARK}, draw_tokens),
    ("compare", {"size": TALL}, draw_compare),
    ("watch", {"size": TALL}, draw_watch),
    ("docs", {"size": SIZE}, draw_docs),
    ("phone", {"size": PHONE, **DARK}, draw_phone),
)
"""Name of a picture, fields of `Visit`, and what is shown."""


def smaller(png: bytes) -> bytes:
    """Return the same picture, compressed as much as zlib can, without metadata."""
    chunks, at = [], 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        chunks.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + length]))
        at += length + 12
    pixels = zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
    packed = min((zlib.compress(pixels, 9), *_by_strategy(pixels)), key=len)
    head = next(data for kind, data in chunks if kind == b"IHDR")
    parts = [(b"IHDR", head), (b"IDAT", packed), (b"IEND", b"")]
    return png[:8] + b"".join(map(_chunk, parts))


def _by_strategy(pixels: bytes) -> list[bytes]:
    packed = []
    for strategy in (zlib.Z_FILTERED, zlib.Z_DEFAULT_STRATEGY):
        packer = zlib.compressobj(9, zlib.DEFLATED, 15, 9, strategy)
        packed.append(packer.compress(pixels) + packer.flush())
    return packed


def _chunk(part: tuple[bytes, bytes]) -> bytes:
    kind, data = part
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    sys.exit(main())
