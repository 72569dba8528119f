"""A gateway with several scripted engines of each role: which engine gets a prompt, and what
happens to the requests of an engine that refuses them or is lost."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from protocol.engine.messages import AbortByLabel, Generate
from protocol.engine.stats import EngineStats
from protocol.wire.errors import ErrorInfo
from tests.support.scripted_engine import (
    Reply,
    ScriptedEngine,
    TokenReply,
    handle_of,
    prefill_reply,
)
from tests.support.scripted_split import (
    COMPLETIONS,
    NEVER,
    PROMPT,
    SHORT,
    TEXT,
    EnginePair,
    PairRequest,
    continued,
    owner_and_other,
    started,
    states,
    stuck_after,
    without_handle,
)
from tests.support.waiting import eventually


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EnginePair]:
    with ExitStack() as stack:
        yield started(EnginePair(tmp_path), stack)


# ---- where prompts are computed


def test_prompts_with_a_common_prefix_go_to_the_p_that_has_it(own: EnginePair) -> None:
    prefixes = ["first " * 20, "second " * 20]
    for number in range(6):
        for prefix in prefixes:
            assert own.complete(prefix + str(number), max_tokens=1).status_code == 200
    found = [{bytes(g.prompt.tolist()[:6]) for g in p.generates} for p in own.p]
    assert sorted(map(len, found)) in ([0, 2], [1, 1]), "a prefix was computed on two engines"
    assert own.metric('tidegate_routed_requests_total{reason="prefix"}') == 10
    assert own.metric('tidegate_routed_requests_total{reason="load"}') == 2


def test_a_prompt_goes_elsewhere_if_the_p_with_its_prefix_is_busy(own: EnginePair) -> None:
    assert own.complete(max_tokens=1).status_code == 200
    first, other = sorted(own.p, key=lambda p: -len(p.generates))
    first.stats = EngineStats(waiting_tokens=9000)
    assert eventually(lambda: 9000 in [state["waiting_tokens"] for state in states(own)])
    assert own.complete(max_tokens=1).status_code == 200
    assert (len(first.generates), len(other.generates)) == (1, 1)


def test_a_session_stays_on_one_p_and_one_d(own: EnginePair) -> None:
    for number in range(5):
        body = {"prompt": f"{number} {PROMPT}", "max_tokens": 1}
        assert own.gateway.post(COMPLETIONS, body, headers={"X-Session-ID": "a"}).ok
    assert sorted(len(p.generates) for p in own.p) == [0, 5]
    assert sorted(len(d.generates) for d in own.d) == [0, 5]


def test_a_prompt_that_one_p_refuses_is_computed_by_the_other(own: EnginePair) -> None:
    first, other = own.p
    first.computes = lambda generate: ErrorInfo(code="overloaded", message="busy")
    other.stats = EngineStats(waiting_tokens=9000)
    assert eventually(lambda: states(own)[1]["waiting_tokens"] == 9000)
    assert own.complete(max_tokens=1).status_code == 200
    assert (len(first.generates), len(other.generates)) == (1, 1)
    assert own.metric('tidegate_moved_requests_total{cause="refused"}') == 1
    assert own.metric("tidegate_handovers_total") == 1


def test_a_prompt_whose_p_is_lost_is_computed_by_the_other(own: EnginePair) -> None:
    for p in own.p:
        p.computes = lambda generate: NEVER
    with PairRequest(own, n=2, max_tokens=2) as asked:
        owner, other = owner_and_other(own.p)
        other.computes = lambda generate: prefill_reply()
        owner.kill()
    assert [choice["text"] for choice in asked.response.json()["choices"]] == ["He", "He"]
    (again,) = other.generates
    assert (again.kv_readers, again.prompt) == (2, owner.generates[0].prompt)
    assert again.answer is not None, "it is not refused because of load"
    assert [consume.kv_handle for consume in own.asked(own.d)] == [handle_of(again)] * 2
    assert own.metric('tidegate_moved_requests_total{cause="lost"}') == 1
    assert own.metric('tidegate_handover_fallbacks_total{cause="lost"}') == 0


def test_a_prompt_that_ends_its_engines_is_given_up(own: EnginePair) -> None:
    """It ends both prefill engines and a decode engine. The other decode engine never gets it."""
    for engine in (*own.p, *own.d):
        engine.computes = engine.script = lambda generate: NEVER
    with PairRequest(own) as asked:
        owner, other = owner_and_other(own.p)
        owner.kill()
        other.await_generates(1)
        other.kill()
        owner, other = owner_and_other(own.d)
        assert owner.generates[0].kv_handle == ""
        owner.kill()
    assert asked.response.status_code == 503
    assert "3 engines were lost" in asked.response.text
    assert other.generates == []


# ---- a decode engine that is lost


def test_a_stream_continues_on_another_d_from_its_tokens(own: EnginePair) -> None:
    for d in own.d:
        d.script = stuck_after(5)
    with PairRequest(own, max_tokens=100, temperature=1.0) as asked:
        owner, other = owner_and_other(own.d)
        owner.await_steps(8)
        other.script = continued
        owner.kill()
    assert asked.response.json()["choices"][0]["text"] == TEXT
    (before,), (after,) = owner.generates, other.generates
    assert (before.kv_handle, after.kv_handle) == (handle_of(own.asked(own.p)[0]), "")
    assert after.answer is not None
    assert bytes(after.answer.tolist()).decode() == TEXT[:5]
    assert (after.prompt, after.params) == (before.prompt, before.params)
    assert after.params.seed is not None
    usage = asked.response.json()["usage"]
    assert usage["completion_tokens"] == len(TEXT) + 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2  # those of the first D
    assert own.metric('tidegate_moved_requests_total{cause="continued"}') == 1
    assert own.metric("tidegate_handovers_total") == 1
    assert len(own.asked(own.p)) == 1


def test_a_request_without_tokens_is_continued_from_the_same_handle(own: EnginePair) -> None:
    for d in own.d:
        d.is_paused = True
    with PairRequest(own, max_tokens=2) as asked:
        owner, other = owner_and_other(own.d)
        released = [h for p in own.p for h in p.released]
        other.is_paused = False
        owner.kill()
    assert asked.response.json()["choices"][0]["text"] == "He"
    (produce,), (again,) = own.asked(own.p), other.generates
    assert released == []
    assert again.kv_handle == handle_of(produce)
    assert again.answer is not None, "it is not refused because of load"
    assert len(again.answer) == 0
    assert eventually(lambda: [h for p in own.p for h in p.released] == [handle_of(produce)])
    assert own.metric('tidegate_moved_requests_total{cause="lost"}') == 1


def test_a_handle_that_the_next_d_refuses_is_done_without(own: EnginePair) -> None:
    for d in own.d:
        d.is_paused = True
    with PairRequest(own, max_tokens=2) as asked:
        owner, other = owner_and_other(own.d)
        other.script = without_handle
        other.is_paused = False
        owner.kill()
    assert asked.response.json()["choices"][0]["text"] == "He"
    (produce,) = own.asked(own.p)
    assert [each.kv_handle for each in other.generates] == [handle_of(produce), ""]
    assert own.metric('tidegate_handover_fallbacks_total{cause="handle"}') == 1
    assert eventually(lambda: [h for p in own.p for h in p.released] == [handle_of(produce)])


def test_requests_wait_for_a_d_if_none_is_ready(own: EnginePair) -> None:
    for d in own.d:
        d.script = stuck_after(3)
    with PairRequest(own, max_tokens=100) as asked:
        owner, other = owner_and_other(own.d)
        owner.await_steps(6)
        other.kill()
        owner.kill()
        assert eventually(lambda: not any(state["ready"] for state in states(own)[2:]))
        with ScriptedEngine(owner.address, continued) as again:
            again.await_generates(1)
            asked.__exit__()
    assert asked.response.json()["choices"][0]["text"] == TEXT


def test_a_request_whose_d_is_lost_during_its_abort_is_not_continued(own: EnginePair) -> None:
    for d in own.d:
        d.script = stuck_after(3)
    with PairRequest(own, max_tokens=100) as asked:
        owner, other = owner_and_other(own.d)
        owner.await_steps(6)
        owner.is_silent = True  # the abort is not answered
        ids = {"request_ids": [owner.generates[0].labels[0]]}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(own.gateway.post, "/inference/v1/abort_requests", ids)
            assert eventually(lambda: AbortByLabel in owner.ignored)
            owner.kill()
        assert answer.result().json()["aborted"] == ids["request_ids"]
    assert asked.response.json()["choices"][0]["finish_reason"] == "abort"
    assert other.generates == []


def test_with_the_policy_error_only_requests_that_need_no_prompt_continue(tmp_path: Path) -> None:
    with ExitStack() as stack:
        own = started(EnginePair(tmp_path, kv_on_failure="error"), stack)
        for d in own.d:
            d.script = stuck_after(3)
        with PairRequest(own, max_tokens=100) as long:
            first, other = owner_and_other(own.d)
            busy = ErrorInfo(code="overloaded", message="busy")
            first.script = lambda generate: busy  # so the other engine gets the next request
            with PairRequest(own, prompt=SHORT, max_tokens=100) as short:
                other.await_generates(1)
                first.await_steps(6)
                other.script = continued
                first.kill()
                long.__exit__()
                with ScriptedEngine(first.address, continued) as again:
                    assert eventually(lambda: all(state["ready"] for state in states(own)))
                    other.kill()
                    short.__exit__()
                    assert len(again.generates) == 1
        assert long.response.json()["error"]["code"] == "engine_lost"
        assert "kv_on_failure" in long.response.text
        assert short.response.json()["choices"][0]["text"] == TEXT


def test_a_server_that_stops_names_the_engine_that_was_lost_first(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = started(EnginePair(tmp_path, num_p=1, num_d=1), stack)
        (p,), (d,) = pair.p, pair.d
        d.script = stuck_after(3)
        with PairRequest(pair, max_tokens=100) as asked:
            d.await_generates(1)
            d.await_steps(4)
            d.kill()
            num_pings = p.num_pings
            assert eventually(lambda: p.num_pings > num_pings + 1)
            p.kill()  # as the supervisor does after D's death
            assert eventually(lambda: not any(state["ready"] for state in states(pair)))
            pair.gateway.signal(signal.SIGQUIT)
        assert "the decode engine was lost" in asked.response.text


# ---- all at once

CLIENTS = 16


class FaultyEngines:
    """Engines that refuse, fail and are replaced at random, but never send a wrong token."""

    def __init__(self, pair: EnginePair, stack: ExitStack) -> None:
        self.alive = {"p": list(pair.p), "d": list(pair.d)}
        self._stack, self._dice = stack, random.Random(7)
        for engine in (*pair.p, *pair.d):
            self._make_faulty(engine)

    def _make_faulty(self, engine: ScriptedEngine) -> None:
        dice = random.Random(self._dice.random())
        busy = ErrorInfo(code="overloaded", message="busy", retry_after_s=1)
        failed = TokenReply([[]], "error", None, ErrorInfo(code="step_failed", message="NaN"))

        def compute(generate: Generate) -> Reply:
            if dice.random() < 0.25:
                return dice.choice((busy, failed))
            return prefill_reply(dice.randrange(1, 9))

        def decode(generate: Generate) -> Reply:
            if generate.answer is None and dice.random() < 0.15:
                return busy
            is_refused = generate.kv_handle and dice.random() < 0.15
            return without_handle(generate) if is_refused else continued(generate)

        engine.computes, engine.script, engine.step_s = compute, decode, 0.01

    def replace(self) -> None:
        """Kill an engine that has made some steps and has an open request, and start another one at
        its address."""
        engines = self.alive[self._dice.choice("pd")]
        place = self._dice.randrange(len(engines))
        old = engines[place]
        assert eventually(lambda: old.num_steps >= 8 and old.num_open, every_s=0.005)
        old.kill()
        engines[place] = ScriptedEngine(old.address)
        self._make_faulty(engines[place])
        self._stack.enter_context(engines[place])


def test_faults_of_all_kinds_at_once_change_no_answer(own: EnginePair) -> None:
    """Clients ask until all engines are replaced that are to be, because an engine without
    requests makes no steps."""
    replaced = threading.Event()

    def ask(client: int) -> list[requests.Response]:
        answers: list[requests.Response] = []
        while len(answers) < 9 or not replaced.is_set():
            number = CLIENTS * len(answers) + client
            text = f"{number % 7} {PROMPT} {number}"
            answers.append(own.complete(text, n=1 + number % 2, max_tokens=100))
        return answers

    with ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as pool:
        faulty = FaultyEngines(own, stack)
        asked = [pool.submit(ask, client) for client in range(CLIENTS)]
        try:
            for _ in range(10):
                faulty.replace()
        finally:
            replaced.set()
        found = [answer for client in asked for answer in client.result()]
        whole = [answer.json() for answer in found if answer.status_code == 200]
        for answer in whole:
            assert {choice["text"] for choice in answer["choices"]} == {TEXT}
        assert {answer.status_code for answer in found} <= {200, 429, 503}
        others = [answer.text for answer in found if answer.status_code != 200]
        assert len(whole) > 2 * len(others), others
        for engine in (*faulty.alive["p"], *faulty.alive["d"]):
            engine.await_idle()
        assert own.metric('tidegate_moved_requests_total{cause="continued"}') > 0
    assert "Traceback" not in own.gateway.log
