"""The chat of the web page, in a browser."""

from __future__ import annotations

import ast
import json
import re
import shlex
from typing import Any

import pytest

from tests.integration.page.conftest import Visitor
from tests.support.browser import await_answer, await_stored, send, texts_of
from tests.support.gateway_process import GatewayProcess
from tests.support.scenarios import call, tool
from tests.support.scripted_engine import ScriptedEngine, prompt_of, text_reply, thinking_card

WORDS = " ".join(f"word{number}" for number in range(100)) + " end"


def replies(engine: ScriptedEngine, *texts: str, size: int = 4) -> None:
    """Reply to the first request with the first of `texts`, and so on; then with the last."""
    left = list(texts)

    def script(generate: Any) -> Any:
        return text_reply(left.pop(0) if len(left) > 1 else left[0], size=size, marked=True)

    engine.script = script


def test_an_answer_is_shown_while_it_is_streamed(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, WORDS)
    engine.step_s = 0.03
    page = visit().open()
    send(page, "Count.")
    answer = page.locator(".message.answer .markdown")
    lengths = [0]
    for _ in range(3):
        page.wait_for_function(
            "shown => document.querySelector('.answer .markdown')?.textContent.length > shown",
            arg=lengths[-1],
        )
        lengths.append(len(answer.inner_text()))
    assert lengths == sorted(set(lengths)), "it only grows"
    assert lengths[-1] < len(WORDS), "several parts are seen before the end"
    engine.step_s = 0.0005
    await_answer(page, "end")
    assert answer.inner_text() == WORDS
    assert re.search(
        r"\d+ tokens · [\d.]+ tokens/s · first token after", answer.locator("..").inner_text()
    )


@pytest.mark.parametrize("slow", ["/v1/models", "/openapi.json"])
def test_a_visitor_may_send_before_the_models_are_known(visit: Visitor, slow: str) -> None:
    visitor = visit()
    release = visitor.hold(slow)
    page = visitor.open()
    send(page, "hi")
    release()
    await_answer(page, "Hello, world!")


def test_stop_ends_the_request_in_the_engine(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, WORDS * 20)
    engine.step_s = 0.03
    page = visit().open()
    send(page, "Count.")
    page.get_by_text("word1", exact=False).first.wait_for()
    page.get_by_role("button", name="Stop").click()
    engine.await_abort(engine.generates[-1].request)
    page.get_by_text("Stopped.").wait_for()
    page.get_by_role("button", name="Send").wait_for()


def test_reasoning_is_folded(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, "<think>\nA secret thought.\n</think>\n\nThe answer.")
    page = visit().open()
    send(page, "Think.")
    await_answer(page, "The answer.")
    thought = page.get_by_text("A secret thought.")
    assert not thought.is_visible()
    page.locator("summary", has_text="Reasoning").click()
    assert thought.is_visible()


def test_a_tool_call_is_shown_and_can_be_answered(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, "I look.\n" + call("weather", {"city": "Oslo"}), "It is sunny in Oslo.")
    page = visit().open()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_text("Tools", exact=True).click()
    definitions = json.dumps([tool("weather", city={"type": "string"})])
    page.get_by_label("Definitions of functions").fill(definitions)
    send(page, "How is the weather?")
    page.get_by_label("What weather returns").wait_for()
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Oslo"}
    assert '<tool>{"type": "function"' in prompt_of(engine)
    page.get_by_label("What weather returns").fill('{"sky": "sunny"}')
    page.get_by_role("button", name="Send the result").click()
    await_answer(page, "It is sunny in Oslo.")
    assert '<tool>{"sky": "sunny"}' in prompt_of(engine)
    assert '{"name": "weather", "arguments": ' in prompt_of(engine)


def test_settings_that_are_not_json_are_refused_with_the_reason(visit: Visitor) -> None:
    page = visit().open()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Definitions of functions").fill("{")
    send(page, "hi")
    page.locator(".problem").get_by_text("Tools is not JSON").wait_for()
    assert page.locator(".message").count() == 0


def test_a_message_can_be_edited_and_an_answer_repeated(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, "First.", "Second.", "Third.")
    page = visit().open()
    send(page, "One?")
    await_answer(page, "First.")
    page.get_by_role("button", name="Retry").click()
    await_answer(page, "Second.")
    assert page.locator(".message").count() == 2
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Two?")
    page.get_by_role("button", name="Send again").click()
    await_answer(page, "Third.")
    assert page.locator(".message").count() == 2
    assert "<user>Two?" in prompt_of(engine)
    assert "One?" not in prompt_of(engine)


def test_conversations_survive_a_reload(visit: Visitor, engine: ScriptedEngine) -> None:
    replies(engine, "About tides.", "About fruits.")
    visitor = visit()
    page = visitor.open()
    send(page, "What is a tide?")
    await_answer(page, "About tides.")
    page.keyboard.press("Alt+n")
    send(page, "Name a fruit.")
    await_answer(page, "About fruits.")
    await_stored(page, "What is a tide?", "About tides.")
    await_stored(page, "Name a fruit.", "About fruits.")
    page.reload()
    await_answer(page, "About fruits.")  # the address names the conversation
    titles = page.locator(".conversations .title")
    assert titles.all_inner_texts() == ["Name a fruit.", "What is a tide?"]
    page.get_by_role("button", name="What is a tide?", exact=True).click()
    await_answer(page, "About tides.")


def test_the_address_of_an_unknown_conversation_is_named(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open("/#chat/0000")
    page.locator(".problem").get_by_text("no conversation with this address").wait_for()
    page.locator("option[value=scripted]").wait_for(state="attached")
    assert page.locator(".problem [role=alert]").count() == 1, "the models do not hide it"
    assert page.evaluate("location.hash") == "#chat"
    send(page, "hi")
    await_answer(page, "Hello, world!")
    assert page.locator(".problem [role=alert]").count() == 0


def test_conversations_can_be_renamed_exported_and_deleted(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open()
    send(page, "hi")
    await_answer(page, "Hello, world!")
    page.locator(".conversations li").hover()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("Greetings")
    page.keyboard.press("Enter")
    page.locator(".conversations li").hover()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export “Greetings”").click()
    saved = json.loads(download.value.path().read_text())
    assert download.value.suggested_filename == "Greetings.json"
    contents = [message["content"] for message in saved["conversations"][0]["messages"]]
    assert contents == ["hi", "Hello, world!"]
    page.get_by_role("button", name="Delete “Greetings”").click()
    assert page.locator(".conversations li").count() == 0
    page.get_by_role("button", name="Undo").click()
    await_stored(page, "Greetings", "Hello, world!")
    page.reload()
    page.get_by_role("button", name="Greetings", exact=True).wait_for()


def test_the_settings_show_the_models_defaults_and_are_sent(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open()
    page.keyboard.press("Alt+s")
    page.get_by_placeholder("0.7", exact=True).wait_for()  # the models have arrived
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.7"
    assert page.get_by_label("Top k").get_attribute("placeholder") == "40"
    page.get_by_label("Temperature").press("ArrowUp")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Seed").fill("17")
    page.get_by_label("System message").fill("Be brief.")
    send(page, "hi")
    await_answer(page, "Hel")
    page.get_by_text("The answer reached its token limit.").wait_for()
    params = engine.generates[-1].params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.8, 40, 3, 17)
    assert "<system>Be brief." in prompt_of(engine)


def test_the_probability_of_a_token_is_shown(visit: Visitor) -> None:
    page = visit().open()
    page.keyboard.press("Alt+s")
    page.get_by_label("Show the probability of each token").check()
    send(page, "hi")
    await_answer(page, "H")
    tokens = page.locator(".tokens span")
    assert "".join(tokens.all_text_contents()) == "Hello, world!<eos>"
    tokens.first.hover()
    card = page.locator(".token-card")
    assert card.locator(".chosen code").inner_text() == "H"
    assert card.locator("code").count() == 5
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert card.locator(".chosen code").inner_text() == "e"
    page.get_by_role("button", name="Show as text").click()
    assert texts_of(page, ".answer .markdown") == ["Hello, world!"]


def test_a_request_can_be_copied_as_curl_and_as_python(
    visit: Visitor, gateway: GatewayProcess
) -> None:
    visitor = visit()
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visitor.open()
    page.keyboard.press("Alt+s")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top k").fill("7")
    question = 'It\'s "quoted" \\ and\nhas two lines: ✓'
    send(page, question)
    await_answer(page, "Hello, world!")
    page.get_by_role("button", name="curl").click()
    program, address, *words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert (program, address) == ("curl", gateway.url + "/v1/chat/completions")
    body = json.loads(words[words.index("-d") + 1])
    assert body["messages"] == [{"role": "user", "content": question}]
    assert (body["temperature"], body["top_k"], body["stream"]) == (0.5, 7, True)
    page.get_by_role("button", name="Python").click()
    tree = ast.parse(page.evaluate("navigator.clipboard.readText()"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = {ast.unparse(node.func): node for node in calls}["client.chat.completions.create"]
    fields = {each.arg: ast.literal_eval(each.value) for each in found.keywords}
    assert fields["messages"] == body["messages"]
    assert (fields["temperature"], fields["extra_body"]) == (0.5, {"top_k": 7})


def test_an_error_has_its_field_its_request_and_a_link_to_the_reference(visit: Visitor) -> None:
    page = visit(refused=(400,)).open()
    page.keyboard.press("Alt+s")
    page.get_by_text("Other fields").click()
    page.get_by_label("A JSON object").fill('{"temperature": 9}')
    send(page, "hi")
    error = page.locator(".answer [role=alert]")
    error.get_by_text("temperature").first.wait_for()
    assert re.search(r"Status 400\s*Request [0-9a-f]{32}", error.inner_text())
    error.get_by_role("link", name="Reference").click()
    page.wait_for_url("**/reference#post_v1_chat_completions")
    page.locator("details#post_v1_chat_completions[open]").wait_for()


def test_a_failure_inside_a_stream_is_shown(visit: Visitor, engine: ScriptedEngine) -> None:
    from protocol.wire.errors import ErrorInfo

    error = ErrorInfo(code="engine_lost", message="the engine was lost")
    engine.script = lambda generate: text_reply("Half", finish="error", error=error)
    page = visit().open()
    send(page, "hi")
    page.locator(".answer [role=alert]").wait_for()
    assert texts_of(page, ".answer .markdown") == ["Half"]


def test_an_answer_goes_on_while_another_tab_is_open(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    replies(engine, WORDS)
    engine.step_s = 0.03
    page = visit().open()
    send(page, "Count.")
    page.locator(".answer .markdown", has_text="word0").wait_for()
    page.get_by_role("link", name="Compare").click()
    page.get_by_label("Prompt").wait_for()
    engine.step_s = 0.0005
    engine.await_idle()
    page.go_back()
    await_answer(page, "end")
    assert texts_of(page, ".answer .markdown") == [WORDS]
    assert not engine.aborts


def test_old_conversations_make_room_for_new_ones(visit: Visitor) -> None:
    page = visit().open()
    removed = page.evaluate(
        """async () => {
          const { surplus, MAX_CONVERSATIONS, MAX_BYTES } = await import("/web/store.js");
          const many = Array.from({ length: MAX_CONVERSATIONS + 2 }, (_, used) =>
            ({ id: `c${used}`, used, bytes: 10 }));
          const large = [
            { id: "old", used: 1, bytes: 1 },
            { id: "open", used: 2, bytes: MAX_BYTES },
            { id: "new", used: 3, bytes: 1 },
          ];
          return [surplus(many, "c5"), surplus(many, "c0"), surplus(large, "open")];
        }"""
    )
    assert removed == [["c1", "c0"], ["c1"], ["old"]]


def test_the_page_waits_until_the_server_is_ready(
    visit: Visitor, tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('late') / 'engine.sock'}"
    with GatewayProcess(engine=address, log_requests=False) as gateway:
        gateway.await_status("/livez", 200)
        page = visit(gateway.url, refused=(503,)).open()
        page.locator(".problem [role=alert]").wait_for()
        with ScriptedEngine(address, card=thinking_card()):
            page.locator("option[value=scripted]").wait_for(state="attached")
            assert page.locator(".problem [role=alert]").count() == 0
            send(page, "hi")
            await_answer(page, "Hello, world!")


@pytest.mark.parametrize("key", ["", "Shift+"])
def test_enter_sends_and_shift_enter_begins_a_line(
    visit: Visitor, engine: ScriptedEngine, key: str
) -> None:
    page = visit().open()
    page.get_by_label("Message", exact=True).fill("one")
    page.keyboard.press(f"{key}Enter")
    if key:
        page.keyboard.type("two")
        page.keyboard.press("Enter")
    await_answer(page, "Hello, world!")
    assert ("one\ntwo" if key else "one") in prompt_of(engine)
