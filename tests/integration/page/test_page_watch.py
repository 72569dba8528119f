"""The watch tab of the web page, in a browser. The engine is real, and its worker takes the time of
a large model on a small GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import requests

from protocol.engine.usage import RequestStatus
from protocol.shared.api_keys import KeyEntry, Scope, digest_of
from tests.integration.page.conftest import Visitor
from tests.support.browser import PHONE, is_wider_than_screen
from tests.support.gateway_process import GatewayProcess
from tests.support.paced_server import paced_server
from tests.support.scripted_engine import ScriptedEngine
from tools.commands.keys import with_key, write

if TYPE_CHECKING:
    from playwright.sync_api import Page

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
NUM_STREAMS, NUM_SLOTS = 6, 4
RUNS = count(1)
SLOTS = ".watch-cells"
CURVE = "document.querySelector('.sparkline polyline')"
BAR = "document.querySelectorAll('.watch-bar i')"
AGE = "document.querySelector('.watch-table tbody td:nth-child(5)')"


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[GatewayProcess]:
    with paced_server(
        "llama-3.1-8b",
        "L40S",
        gateway={"log_requests": False},
        max_slots=NUM_SLOTS,
        max_len=8192,
    ) as gateway:
        yield gateway


@contextmanager
def running(server: GatewayProcess) -> Iterator[list[str]]:
    """Keep more requests open than there are slots. Yield their names, in order of arrival."""
    run = next(RUNS)
    names = [f"job-{run}-{number}" for number in range(NUM_STREAMS)]
    params = {"max_tokens": 7000, "ignore_eos": True}

    def generate(name: str) -> int:
        body = {"token_ids": [1, *range(700)], "sampling_params": params}
        headers = {"X-Request-Id": name}
        return server.post(GENERATE, body, headers=headers).status_code

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [pool.submit(generate, name) for name in names]
        try:
            yield names
        finally:
            while not all(answer.done() for answer in answers):
                requests.post(server.url + ABORT, json={"request_ids": names}, timeout=20)


def await_slots(page: Page, used: int) -> None:
    page.get_by_text(f"{used} of {NUM_SLOTS} slots used").wait_for()


def test_numbers_move_while_requests_run(visit: Visitor, server: GatewayProcess) -> None:
    page = visit(server.url).open("/#watch")
    await_slots(page, 0)
    page.get_by_text("No request is waiting.").wait_for()
    with running(server):
        await_slots(page, NUM_SLOTS)
        page.get_by_text("2 waiting in the queue").wait_for()
        assert page.locator(f"{SLOTS} i.free").count() == 0
        speed = page.locator(".watch-number dd").first
        page.wait_for_function(
            "() => Number(document.querySelector('.watch-number dd').textContent) > 0"
        )
        assert float(speed.inner_text()) > 0
        page.wait_for_function("() => document.querySelectorAll('.watch-steps .decode').length > 3")
        page.get_by_text(re.compile(r"99 % ≤ [\d.]+ ")).first.wait_for()
        line = page.locator(".sparkline polyline").first
        before = line.get_attribute("points")
        page.wait_for_function(f"before => {CURVE}.getAttribute('points') !== before", arg=before)
        widths = page.evaluate(f"[...{BAR}].map(each => parseFloat(each.style.width))")
        assert sum(widths) == pytest.approx(100)
        assert widths[0] > 0
    await_slots(page, 0)
    page.get_by_text("No open request.").wait_for()


def generate(server: GatewayProcess, max_tokens: int) -> None:
    params = {"max_tokens": max_tokens, "ignore_eos": True}
    server.post(GENERATE, {"token_ids": [*range(40)], "sampling_params": params})


def test_the_charts_are_full_when_the_view_opens_and_have_scales(
    visit: Visitor, server: GatewayProcess
) -> None:
    generate(server, 20)
    page = visit(server.url).open("/#watch")
    await_slots(page, 0)
    speed, steps = page.locator(".watch-number").first, page.locator(".watch-chart")
    points = (speed.locator("polyline").get_attribute("points") or "").split()
    assert len(points) == 90
    assert re.fullmatch(r"\d+/s\s+90 s ago\s*now", speed.locator(".watch-curve").inner_text())
    assert steps.locator(".decode").count() > 0
    assert re.fullmatch(r"[\d,]+ tokens\s+0\s+[\d.]+ m?s\s+older\s*last step", steps.inner_text())
    page.get_by_text(re.compile(r"[\d,]+ blocks of \d+ tokens")).wait_for()


def test_the_requests_are_on_the_first_screen(visit: Visitor, server: GatewayProcess) -> None:
    page = visit(server.url, size=(1280, 900)).open("/#watch")
    with running(server):
        row = page.locator(".watch-table tbody tr", has_text="answering").first
        row.wait_for()
        box = row.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 900


def test_a_column_that_would_be_empty_is_not_shown(visit: Visitor, engine: ScriptedEngine) -> None:
    heads = "[...document.querySelectorAll('.watch-table thead th')]"
    shown = f"{heads}.filter(each => each.offsetWidth).map(each => each.textContent)"
    page = visit().open("/#watch")
    page.get_by_text("No open request.").wait_for()
    assert not page.locator(".watch-table").is_visible()
    engine.rows = [RequestStatus(name="one", stage="decode", waits_for="step")]
    page.get_by_role("button", name="one").wait_for()
    assert page.evaluate(shown) == ["Request", "Stage", "Age", "Prompt", "Answer", "Tokens/s"]
    engine.rows = [RequestStatus(name="two", account="bob", stage="queued", waits_for="slot")]
    page.get_by_role("button", name="two").wait_for()
    assert page.evaluate(shown)[1:4] == ["Account", "Stage", "Waits for"]
    engine.rows = []


def test_nothing_is_said_of_the_requests_of_an_engine_that_does_not_answer(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open("/#watch")
    page.get_by_text("No open request.").wait_for()
    engine.is_silent = True
    page.get_by_text("the engine does not answer", exact=True).wait_for()
    assert page.get_by_text("No open request.").count() == 0
    engine.is_silent = False
    page.get_by_text("No open request.").wait_for()


def test_the_table_says_what_each_request_waits_for(visit: Visitor, server: GatewayProcess) -> None:
    page = visit(server.url).open("/#watch")
    with running(server):
        # The requests start one after the other, and a frame may show some of them before.
        page.locator("tr", has_text="answering").nth(NUM_SLOTS - 1).wait_for()
        page.locator("tbody tr", has_text="a free slot").nth(1).wait_for()
        assert page.locator(".watch-table tbody tr").count() == NUM_STREAMS
        before = page.evaluate(f"{AGE}.textContent")
        page.wait_for_function(f"before => {AGE}.textContent !== before", arg=before)


def test_a_click_explains_a_request_and_follows_it_to_its_end(
    visit: Visitor, server: GatewayProcess
) -> None:
    page = visit(server.url).open("/#watch")
    panel = page.get_by_role("region", name="Timeline")
    with running(server):
        page.locator("tbody tr", has_text="a free slot").first.click()
        panel.get_by_text(re.compile(r"took .* for a slot: all 4 were in use")).first.wait_for()
        name = page.evaluate("decodeURIComponent(location.hash).split('/')[1]")
        assert name.startswith("generate-tokens-job-")
        assert panel.get_by_text("open · ").count() == 1
        page.locator("tbody tr", has_text="answering").first.get_by_role("button").press("Enter")
        panel.get_by_text("because 3 other requests decoded with it").first.wait_for()
        assert panel.locator(".lane i.own-decode").count() > 0
        assert panel.locator(".lane i.stage-decode").count() == 1
    panel.get_by_text("aborted: it was aborted by its id").first.wait_for()
    panel.locator("summary").click()
    assert panel.locator("tbody tr").count() > 2
    panel.get_by_role("button", name="Close the timeline").click()
    panel.wait_for(state="hidden")


def test_an_ended_request_is_found_by_its_id_and_by_its_address(
    visit: Visitor, server: GatewayProcess
) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
    server.post(GENERATE, body, headers={"X-Request-Id": "team/ended-1"})
    visitor = visit(server.url, refused=(404,))
    page = visitor.open("/#watch")
    page.get_by_label("Why was this request slow?").fill("team/ended-1")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("ended with 'length'").wait_for()
    page = visit(server.url).open("/#watch/team/ended-1")
    page.get_by_text("ended with 'length'").wait_for()
    page = visitor.open("/#watch/nobody")
    page.get_by_text("each for up to 15 minutes").wait_for()


def test_a_paused_page_stands_still_and_costs_nothing(
    visit: Visitor, engine: ScriptedEngine
) -> None:
    page = visit().open("/#watch")
    page.get_by_text("Live, every 1 s").wait_for()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Paused", exact=True).first.wait_for()
    polls, pings = -1, 0
    while polls != engine.num_polls:  # the last poll may still be on its way
        polls, pings = engine.num_polls, engine.num_pings
        page.wait_for_timeout(10)
        while engine.num_pings < pings + 4:
            page.wait_for_timeout(50)
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("Live, every 1 s").wait_for()
    assert engine.num_polls > polls


def test_the_state_is_said_in_words(visit: Visitor, server: GatewayProcess) -> None:
    page = visit(server.url).open("/#watch")
    await_slots(page, 0)
    page.get_by_text("In words").click()
    words = page.locator(".watch-words")
    assert f"0 of {NUM_SLOTS} slots are used" in words.inner_text()
    for label in page.locator("[role=img]").all():
        assert label.get_attribute("aria-label")


def test_a_hybrid_has_its_checkpoints_and_the_memory_of_its_states(
    visit: Visitor, server: GatewayProcess
) -> None:
    with paced_server("qwen3.5-9b", "H100", max_slots=2, max_len=4096) as hybrid:
        body = {"token_ids": [*range(40)], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
        hybrid.post(GENERATE, body)
        page = visit(hybrid.url).open("/#watch")
        card = page.locator(".watch-states")
        card.get_by_text("1 cached, free when needed").wait_for()
        card.get_by_text(
            re.compile(r"A state takes 50.. MiB. 50.. MiB of 502.5 MiB are")
        ).wait_for()
        page.get_by_text("In words").click()
        words = page.locator(".watch-words").inner_text()
        assert "Of 8 checkpoints of recurrent states, 0 belong to requests, 1 are cached" in words
        page.goto("about:blank")
    page = visit(server.url).open("/#watch")
    await_slots(page, 0)
    assert not page.locator(".watch-states").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(
    scheme: str, visit: Visitor, server: GatewayProcess
) -> None:
    options = {"has_touch": True, "is_mobile": True, "color_scheme": scheme}
    page = visit(server.url, size=PHONE, options=options).open("/#watch")
    with running(server):
        await_slots(page, NUM_SLOTS)
        page.locator("tbody tr", has_text="answering").first.get_by_role("button").click()
        page.locator(".watch-gantt").wait_for()
        page.locator(".watch-choice summary").click()
        assert not is_wider_than_screen(page)


def test_a_key_without_the_scope_is_refused_and_another_is_asked_for(
    visit: Visitor, engine: ScriptedEngine, tmp_path: Any
) -> None:
    text = ""
    keys: dict[str, list[Scope]] = {"plain": ["inference"], "root": ["inference", "admin"]}
    for name, scopes in keys.items():
        entry = KeyEntry(digest=digest_of(f"tg-{name:x<43}"), scopes=scopes)
        text = with_key(text, name, entry)
    write(tmp_path / "keys.toml", text)
    config: dict[str, Any] = {"api_keys": str(tmp_path / "keys.toml"), "log_requests": False}
    with GatewayProcess(engine=engine.address, **config) as locked:
        page = visit(locked.await_ready().url, refused=(401, 403)).open("/#watch")
        page.get_by_label("Key", exact=True).fill(f"tg-{'plain':x<43}")
        page.keyboard.press("Enter")
        page.get_by_text("this API key lacks the scope").wait_for()
        assert not page.get_by_text("No open request.").is_visible(), "nothing is known about them"
        assert not page.locator(".watch-table").is_visible()
        page.get_by_role("button", name="Use another key").click()
        page.get_by_label("Key", exact=True).fill(f"tg-{'root':x<43}")
        page.keyboard.press("Enter")
        page.get_by_text("Live, every 1 s").wait_for()
        page.goto("about:blank")


def test_names_of_requests_are_only_text(visit: Visitor, engine: ScriptedEngine) -> None:
    evil = "<img src=x onerror=window.hacked=1>"
    engine.rows = [RequestStatus(name=evil, account=evil, stage=evil, waits_for=evil)]
    page = visit().open("/#watch")
    page.get_by_role("button", name=evil).wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("tbody td", has_text=evil).count() == 2
    engine.rows = []
