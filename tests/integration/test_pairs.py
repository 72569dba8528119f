"""A gateway with scripted prefill and decode engines: which engine gets which request, also if
engines fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from protocol.engine.messages import Generate
from protocol.engine.stats import EngineStats
from protocol.wire.errors import ErrorInfo
from tests.support.http import connect, send_post
from tests.support.scripted_engine import (
    BLOCK_TOKENS,
    Reply,
    Script,
    ScriptedEngine,
    TokenReply,
    handle_of,
    ids_of,
    prefill_reply,
    scripted_card,
    text_reply,
)
from tests.support.scripted_split import (
    COMPLETIONS,
    NEVER,
    PROMPT,
    SHORT,
    EnginePair,
    PairRequest,
    names,
    started,
    states,
    without_handle,
)
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    with ExitStack() as stack:
        yield started(EnginePair(tmp_path_factory.mktemp("pairs")), stack)


@pytest.fixture
def pair(shared: EnginePair) -> Iterator[EnginePair]:
    """Yield the shared engines in their initial state. A test must leave no request open."""
    shared.forget()
    yield shared
    for engine in (*shared.p, *shared.d):
        engine.script = lambda generate: text_reply("Hello, world!")
        engine.computes = lambda generate: prefill_reply()
        engine.is_paused = False
        engine.await_idle()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EnginePair]:
    with ExitStack() as stack:
        yield started(EnginePair(tmp_path), stack)


# ---- the way it should go


def test_a_prompt_is_computed_by_p_and_gone_on_from_by_d(pair: EnginePair) -> None:
    before = pair.metric("tidegate_handovers_total")
    response = pair.complete(max_tokens=5, seed=3)
    assert response.json()["choices"][0]["text"] == "Hello"
    (produce,), (consume,) = pair.asked(pair.p), pair.asked(pair.d)
    assert (produce.kv_readers, produce.kv_handle) == (1, "")
    assert (consume.kv_readers, consume.kv_handle) == (0, handle_of(produce))
    assert produce.prompt == consume.prompt
    assert (consume.params.max_tokens, consume.params.seed) == (5, 3)
    assert eventually(lambda: [h for p in pair.p for h in p.released] == [handle_of(produce)])
    assert pair.metric("tidegate_handovers_total") == before + 1


@pytest.mark.parametrize(("state_bytes", "num_prefills"), [(0, 2), (8, 1)])
def test_a_prompt_of_one_block_is_computed_by_d_if_the_model_has_a_state(
    tmp_path: Path, state_bytes: int, num_prefills: int
) -> None:
    pair = EnginePair(tmp_path, num_p=1, num_d=1)
    for engine in (*pair.p, *pair.d):
        engine.state_bytes = state_bytes
    with ExitStack() as stack:
        started(pair, stack)
        for length in (BLOCK_TOKENS, BLOCK_TOKENS + 1):
            pair.complete(prompt="a" * length, max_tokens=2)
        (p,), (d,) = pair.p, pair.d
        assert [len(generate.prompt) for generate in d.generates] == [16, 17]
        assert [len(generate.prompt) for generate in p.generates] == [16, 17][-num_prefills:]


def test_the_choices_of_a_prompt_share_its_prefill(pair: EnginePair) -> None:
    response = pair.complete(n=3, max_tokens=2)
    assert [choice["text"] for choice in response.json()["choices"]] == ["He"] * 3
    (produce,), consumes = pair.asked(pair.p), pair.asked(pair.d)
    assert produce.kv_readers == 3
    assert [consume.kv_handle for consume in consumes] == [handle_of(produce)] * 3
    assert eventually(lambda: [h for p in pair.p for h in p.released] == [handle_of(produce)])


def test_prompts_that_differ_are_computed_apart_on_both(pair: EnginePair) -> None:
    def numbers_asked(engines: list[ScriptedEngine]) -> list[int]:
        return [len(engine.generates) for engine in engines]

    def counting(d: ScriptedEngine) -> Script:
        """Return a script that counts the open requests, as a real engine does."""

        def script(generate: Generate) -> Reply:
            d.stats = EngineStats(running=1 + len(d.generates))
            return NEVER

        return script

    for d in pair.d:
        d.script = counting(d)
    # On a busy machine, an engine may just have been too late to be used.
    assert eventually(lambda: all(state["ready"] for state in states(pair)))
    try:
        with PairRequest(pair, prompt=["1 " + PROMPT, "2 " + PROMPT], max_tokens=1):
            are_asked = eventually(lambda: numbers_asked(pair.d) == [1, 1])
            pair.gateway.post("/inference/v1/abort_requests", {"request_ids": names(pair.d)})
    finally:
        for d in pair.d:
            d.stats = EngineStats(running=1)
    assert are_asked, numbers_asked(pair.d)
    assert numbers_asked(pair.p) == [1, 1]


@pytest.mark.parametrize(
    "fields", [{"prompt": SHORT}, {"max_tokens": 0, "echo": True}, {"echo": True, "logprobs": 0}]
)
def test_d_computes_alone_if_a_handoff_is_not_worth_it(
    pair: EnginePair, fields: dict[str, Any]
) -> None:
    before = pair.metric("tidegate_handovers_total")
    assert pair.complete(**fields).status_code == 200
    assert pair.asked(pair.p) == []
    (consume,) = pair.asked(pair.d)
    assert consume.kv_handle == ""
    assert pair.metric("tidegate_handovers_total") == before


def test_tokens_that_p_computed_do_not_count_as_cached(pair: EnginePair) -> None:
    usage = pair.complete(max_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == len(ids_of(PROMPT))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2  # which P, too, found


def test_the_least_busy_are_asked(pair: EnginePair) -> None:
    (busy_p, free_p), (free_d, busy_d) = pair.p, pair.d
    try:
        busy_p.stats, busy_d.stats = EngineStats(waiting_tokens=9000), EngineStats(running=5)
        assert eventually(lambda: states(pair)[0]["waiting_tokens"] == 9000)
        assert eventually(lambda: states(pair)[3]["running"] == 5)
        for _ in range(3):
            assert pair.complete(max_tokens=1).status_code == 200
        assert (len(busy_p.generates), len(free_p.generates)) == (0, 3)
        assert (len(busy_d.generates), len(free_d.generates)) == (0, 3)
    finally:
        busy_p.stats = busy_d.stats = EngineStats()


def test_a_lease_is_kept_until_ds_first_token(pair: EnginePair) -> None:
    def result(words: str) -> list[str]:
        """Return the handles that P received for this test's requests, once per message.

        words   "kept" for KeepKV messages, "released" for ReleaseKV messages
        """
        ours = {handle_of(produce) for produce in pair.asked(pair.p)}
        return [handle for p in pair.p for handle in getattr(p, words) if handle in ours]

    for d in pair.d:
        d.is_paused = True
    with PairRequest(pair, max_tokens=1):
        kept = eventually(lambda: len(result("kept")) >= 2)  # of a lease of 3 s
        released_early = result("released")
        for d in pair.d:
            d.is_paused = False
    assert kept
    assert not released_early
    (produce,) = pair.asked(pair.p)
    assert eventually(lambda: result("released") == [handle_of(produce)])


# ---- what can go wrong


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (ErrorInfo(code="overloaded", message="busy"), "refused"),
        (TokenReply([[]], "error", None, ErrorInfo(code="step_failed", message="NaN")), "failed"),
        (TokenReply([[1]], "stop", None), "failed"),  # no handle
    ],
)
def test_d_computes_a_prompt_that_p_does_not(pair: EnginePair, answer: Any, cause: str) -> None:
    line = f'tidegate_handover_fallbacks_total{{cause="{cause}"}}'
    before = pair.metric(line)
    for p in pair.p:
        p.computes = lambda generate: answer
    response = pair.complete(n=2, max_tokens=2)
    assert [choice["text"] for choice in response.json()["choices"]] == ["He", "He"]
    assert [consume.kv_handle for consume in pair.asked(pair.d)] == ["", ""]
    assert pair.metric(line) == before + 2


def test_a_handle_that_d_refuses_is_done_without(pair: EnginePair) -> None:
    for d in pair.d:
        d.script = without_handle
    assert pair.complete().json()["choices"][0]["text"] == "Hello"
    (produce,) = pair.asked(pair.p)
    assert {c.kv_handle for c in pair.asked(pair.d)} == {handle_of(produce), ""}
    assert eventually(lambda: [h for p in pair.p for h in p.released] == [handle_of(produce)])


def test_a_refusal_of_d_is_reported_and_p_is_released(pair: EnginePair) -> None:
    for d in pair.d:
        d.script = lambda generate: ErrorInfo(code="overloaded", message="full", retry_after_s=3)
    response = pair.complete()
    assert (response.status_code, response.headers["Retry-After"]) == (429, "3")
    (produce,) = pair.asked(pair.p)
    assert eventually(lambda: [h for p in pair.p for h in p.released] == [handle_of(produce)])


def hang_up_while(pair: EnginePair, claim: Any) -> None:
    """Request a stream, and hang up as soon as `claim` is true."""
    with connect(pair.gateway.port) as sock:
        send_post(sock, COMPLETIONS, {"prompt": PROMPT, "stream": True, "max_tokens": 400})
        assert eventually(claim)


def test_a_client_that_leaves_during_the_prefill_aborts_p(pair: EnginePair) -> None:
    for p in pair.p:
        p.computes = lambda generate: NEVER
    hang_up_while(pair, lambda: pair.asked(pair.p))
    assert eventually(lambda: [n for p in pair.p for n in p.aborts])
    assert [why for p in pair.p for why in p.abort_reasons.values()] == ["disconnected"]
    assert pair.asked(pair.d) == []


def test_a_handle_that_comes_when_everybody_has_gone_is_released(pair: EnginePair) -> None:
    """The scripted engine finishes although it was aborted, as a real one may."""
    p = pair.p[0]
    pair.p[1].stats = EngineStats(waiting_tokens=9000)
    assert eventually(lambda: states(pair)[1]["waiting_tokens"] == 9000)
    p.ignores_aborts = p.is_paused = True
    try:
        hang_up_while(pair, lambda: p.generates)
        assert eventually(lambda: p.aborts)
        p.is_paused = False
        assert eventually(lambda: p.released == [handle_of(p.generates[0])])
        assert pair.asked(pair.d) == []
    finally:
        p.ignores_aborts = False
        pair.p[1].stats = EngineStats()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_d_aborts_d_and_releases_the_lease(
    pair: EnginePair, streams: bool
) -> None:
    for d in pair.d:
        d.script = lambda generate: text_reply("x" * 300) if streams else NEVER
        d.step_s = 0.01
    hang_up_while(pair, lambda: pair.asked(pair.d))
    assert eventually(lambda: [n for d in pair.d for n in d.aborts])
    assert [why for d in pair.d for why in d.abort_reasons.values()] == ["disconnected"]
    (produce,) = pair.asked(pair.p)
    assert eventually(lambda: [h for p in pair.p for h in p.released] == [handle_of(produce)])
    for d in pair.d:
        d.step_s = 0.0005


@pytest.mark.parametrize("role", ["p", "d"])
def test_an_abort_by_name_works_at_p_and_at_d(pair: EnginePair, role: str) -> None:
    engines = getattr(pair, role)
    for engine in engines:
        engine.computes = engine.script = lambda generate: NEVER
    with PairRequest(pair) as asked:
        assert eventually(lambda: pair.asked(engines))
        (name, *_) = pair.asked(engines)[0].labels
        result = pair.gateway.post("/inference/v1/abort_requests", {"request_ids": [name, "no"]})
        assert result.json() == {"aborted": [name], "unknown": ["no"]}
    assert asked.response.json()["choices"][0]["finish_reason"] == "abort"


# ---- engines that come and go


def test_requests_continue_without_a_dead_p_and_use_it_again_later(
    own: EnginePair,
) -> None:
    for p in own.p:
        p.computes = lambda generate: NEVER
    with (
        PairRequest(own, max_tokens=2) as one,
        PairRequest(own, max_tokens=2, stream=True) as other,
    ):
        assert eventually(lambda: len(own.asked(own.p)) == 2)
        for p in own.p:
            p.kill()
    assert one.response.json()["choices"][0]["text"] == "He"
    assert other.response.text.endswith("data: [DONE]\n\n")
    assert own.metric('tidegate_handover_fallbacks_total{cause="lost"}') == 2
    assert [state["ready"] for state in states(own)] == [False, False, True, True]
    assert requests.get(own.gateway.url + "/readyz", timeout=5).status_code == 200
    for _ in range(2):
        assert own.complete(max_tokens=2).status_code == 200
    assert own.metric('tidegate_handover_fallbacks_total{cause="no_prefill"}') == 2
    assert own.gateway.log.count("no prefill engine") == 1
    with ScriptedEngine(own.p[0].address):
        assert eventually(lambda: states(own)[0]["ready"])
        before = own.metric("tidegate_handovers_total")
        assert own.complete(max_tokens=2).status_code == 200
        assert own.metric("tidegate_handovers_total") == before + 1


def test_without_a_d_open_requests_fail_and_new_ones_are_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        own = started(EnginePair(tmp_path, failover_s=0.5), stack)
        for d in own.d:
            d.script = lambda generate: NEVER
        with PairRequest(own) as asked:
            assert eventually(lambda: own.asked(own.d))
            (produce,) = own.asked(own.p)
            for d in own.d:
                d.kill()
        error = asked.response.json()["error"]
        assert (asked.response.status_code, error["code"]) == (503, "engine_lost")
        assert eventually(lambda: [h for p in own.p for h in p.released] == [handle_of(produce)])
        facts = own.gateway.await_status("/readyz", 503).json()
        assert not facts["ready"]
        assert "broke" in facts["why"]
        refused = own.complete()
        assert refused.status_code == 503
        assert "ipc://" not in refused.text


def test_the_policy_may_be_an_error(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = started(EnginePair(tmp_path, kv_on_failure="error"), stack)
        for p in pair.p:
            p.computes = lambda generate: ErrorInfo(code="overloaded", message="busy")
        assert pair.complete().status_code == 429
        assert pair.complete(n=2).status_code == 429
        for p in pair.p:
            p.computes = lambda generate: TokenReply(
                [[]], "error", None, ErrorInfo(code="step_failed", message="NaN")
            )
        assert [pair.complete(n=n).status_code for n in (1, 2)] == [500, 500]
        assert pair.asked(pair.d) == []
    assert "Traceback" not in pair.gateway.log


def test_an_engine_with_another_model_is_not_used(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = EnginePair(tmp_path)
        late = pair.d.pop()  # both models are on one D each, and the first one is served
        late.card = pair.p[0].card = pair.p[1].card = scripted_card(digest="f" * 16)
        started(pair, stack, unstarted=1)
        pair.d.append(stack.enter_context(late))
        assert eventually(lambda: all(state["ready"] for state in states(pair)))
        assert [pair.complete(max_tokens=2).status_code for _ in range(3)] == [200] * 3
        assert (len(pair.asked(pair.p)), len(pair.d[0].generates)) == (0, 3)
    assert "another model" in pair.gateway.log


def test_engines_with_other_numerics_are_logged_and_answers_promise_no_bits(
    tmp_path: Path,
) -> None:
    pair = EnginePair(tmp_path)
    for engine, numerics in zip([*pair.p, *pair.d], ["aa11", "bb22", "aa11", "aa11"], strict=True):
        engine.card = scripted_card(numerics=numerics)
    with ExitStack() as stack:
        started(pair, stack)
        fingerprint = pair.complete().json()["system_fingerprint"]
        lines = [line for line in pair.gateway.log.splitlines() if "compute other bits" in line]
    assert fingerprint.count("-") == 2, "the fourth part promises bits"
    # Which engine answers first is chance. Each line compares one with it, and only one has bb22.
    assert lines
    for line in lines:
        assert "aa11" in line
        assert f"the prefill engine {pair.p[1].address} has" in line
        assert "bb22" in line
