"""Answers of the web page that were cut go on where they ended, with no word doubled or lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from protocol.wire.errors import ErrorInfo
from tests.integration.page.conftest import Visitor
from tests.integration.page.test_page_chat import replies
from tests.support.browser import await_answer, await_stored, send, texts_of
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, prompt_of, text_reply, thinking_card

if TYPE_CHECKING:
    from playwright.sync_api import Page

TEXT = "One two three four five six seven."
REASONS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def goes_on(generate: Any) -> Any:
    """Write `TEXT`, or the part of it that the prompt does not end with."""
    begun = bytes(token for token in generate.prompt.tolist() if token < 256).decode()
    written = begun.rpartition("<assistant>")[2]
    assert TEXT.startswith(written)
    return text_reply(TEXT[len(written) :], size=1, marked=True)


def go_on(page: Page, end: str) -> str:
    """Continue the last answer until a text arrives, and return the whole answer."""
    page.get_by_role("button", name="Continue").click()
    await_answer(page, end)
    return texts_of(page, ".answer .markdown")[-1]


@pytest.mark.parametrize("length", [6, 7, 8, 9], ids=["word", "word end", "blank", "next word"])
def test_an_answer_goes_on_after_its_token_limit(
    visit: Visitor, engine: ScriptedEngine, length: int
) -> None:
    engine.script = goes_on
    page = visit().open()
    page.keyboard.press("Alt+s")
    page.get_by_label("Max tokens").fill(str(length))
    send(page, "Count.")
    page.get_by_text("The answer reached its token limit.").wait_for()
    page.get_by_label("Max tokens").fill("100")
    assert go_on(page, "seven.") == TEXT
    assert prompt_of(engine).endswith(f"<assistant>{TEXT[:length].rstrip()}")
    assert page.get_by_role("button", name="Continue").count() == 0
    tokens = length + len(TEXT) - len(TEXT[:length].rstrip()) + 1  # one ends the answer
    page.get_by_text(f"{tokens} tokens").wait_for()
    await_stored(page, "Count.", TEXT)


def test_an_answer_goes_on_after_a_stop(visit: Visitor, engine: ScriptedEngine) -> None:
    engine.script = goes_on
    engine.step_s = 0.2
    page = visit().open()
    send(page, "Count.")
    page.locator(".answer .markdown", has_text="One two").wait_for()
    engine.is_paused = True
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    engine.step_s = 0.0005
    engine.resume()
    assert go_on(page, "seven.") == TEXT


def test_an_answer_goes_on_after_its_page_was_closed(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    engine.script = goes_on
    engine.step_s = 0.2
    page = visit().open()
    send(page, "Count.")
    page.locator(".answer .markdown", has_text="One").wait_for()
    engine.is_paused = True
    page.evaluate(
        """async () => {
          const { chats } = await import("/web/session.js");
          await chats.save(chats.conversations[0]);
        }"""
    )
    page.reload()
    page.get_by_text("The page was closed before the answer was complete.").wait_for()
    engine.step_s = 0.0005
    engine.resume()
    assert go_on(page, "seven.") == TEXT


def test_an_answer_goes_on_after_a_failure(visit: Visitor, engine: ScriptedEngine) -> None:
    error = ErrorInfo(code="engine_lost", message="the engine was lost")
    engine.script = lambda generate: text_reply("One two thr", finish="error", error=error)
    page = visit().open()
    send(page, "Count.")
    page.locator(".answer [role=alert]").wait_for()
    engine.script = goes_on
    assert go_on(page, "seven.") == TEXT
    assert page.locator(".answer [role=alert]").count() == 0


def test_an_answer_goes_on_inside_its_reasoning(
    visit: Visitor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('reasons') / 'engine.sock'}"
    card = thinking_card(chat_template=REASONS)
    with (
        ScriptedEngine(address, card=card) as engine,
        GatewayProcess(engine=address, log_requests=False) as gateway,
    ):
        gateway.await_ready()
        replies(engine, "<think>\nFirst I look around.", size=1)
        page = visit(gateway.url).open()
        page.keyboard.press("Alt+s")
        page.get_by_label("Max tokens").fill("12")
        send(page, "Where?")
        page.get_by_text("The answer reached its token limit.").wait_for()
        assert page.locator(".thought").text_content() == "First I lo"
        page.get_by_label("Max tokens").fill("")
        replies(engine, "ok around.\n</think>\n\nHere.", size=1)
        assert go_on(page, "Here.") == "Here."
        assert prompt_of(engine).endswith("<assistant><think>\nFirst I lo")
        assert page.locator(".thought").text_content() == "First I look around."


@pytest.mark.parametrize("text", ["", "Done."], ids=["no text", "complete"])
def test_what_is_complete_or_has_no_text_cannot_go_on(
    visit: Visitor, engine: ScriptedEngine, text: str
) -> None:
    finish = "stop" if text else "length"
    engine.script = lambda generate: text_reply(text, finish=finish)
    page = visit().open()
    send(page, "Count.")
    page.locator(".message.answer[aria-busy=false]").get_by_role("button", name="Retry").wait_for()
    assert page.get_by_role("button", name="Continue").count() == 0
