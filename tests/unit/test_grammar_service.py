"""The compiler threads: jobs, results, timeouts, and the descriptor that signals results."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from engine_core.grammar.jobs import CompiledGrammar, CompileJob
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.grammar.service import NUM_THREADS, GrammarService
from protocol.engine.grammar import ChoiceGrammar, Grammar, Regex
from protocol.wire.errors import InvalidRequest, Overloaded
from tests.support.grammars import signs_card
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
WAIT_MS = 60_000
TIMEOUT_S = 10.0


class FakeClock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def service(clock: FakeClock) -> Iterator[GrammarService]:
    made = GrammarService(TIMEOUT_S, clock)
    yield made
    made.close()


def job(name: str, body: Any) -> CompileJob:
    return CompileJob(name.encode(), Grammar(body=body))


def wait_for_results(service: GrammarService, count: int) -> dict[str, CompiledGrammar]:
    """Wait for `count` results, as the loop does. Return them by the names of their jobs."""
    poller = select.poll()
    poller.register(service.fd, select.POLLIN)
    results: dict[str, CompiledGrammar] = {}
    while len(results) < count:
        assert poller.poll(WAIT_MS), "no result came"
        results |= {compiled.digest.decode(): compiled for compiled in service.drain()}

    def is_quiet() -> bool:
        """Return whether the descriptor is unreadable after a drain. A thread may signal once more
        after its result was drained."""
        assert not service.drain()
        return not poller.poll(0)

    assert eventually(is_quiet), "the descriptor stays readable, so the loop would spin"
    return results


def test_compile_jobs_return_templates_or_request_errors(
    service: GrammarService, clock: FakeClock
) -> None:
    service.submit(job("early", Regex(pattern="a")))
    service.start(signs_card())
    service.submit(job("good", Regex(pattern="b")))
    service.submit(job("bad", Regex(pattern="(")))
    results = wait_for_results(service, 3)
    assert isinstance(results["early"].result, MatcherTemplate)
    assert isinstance(results["good"].result, MatcherTemplate)
    assert isinstance(results["bad"].result, InvalidRequest)
    assert not service.is_busy
    clock.now = 1e9
    assert service.drain() == []


def test_a_job_that_was_never_started_is_refused_as_the_servers_fault(
    service: GrammarService, clock: FakeClock
) -> None:
    service.submit(job("late", Regex(pattern="a")))
    clock.now += TIMEOUT_S
    assert service.is_busy
    assert service.drain() == []
    clock.now += 0.1
    (refusal,) = service.drain()
    assert (refusal.digest, type(refusal.result)) == (b"late", Overloaded)
    assert refusal.result.retry_after_s
    assert not service.is_busy


def test_an_overdue_job_is_never_compiled(service: GrammarService, clock: FakeClock) -> None:
    service.submit(job("late", Regex(pattern="a")))
    clock.now += TIMEOUT_S + 1
    service.drain()
    service.submit(job("next", Regex(pattern="b")))
    service.start(signs_card())
    assert wait_for_results(service, 1).keys() == {"next"}
    assert not service.is_busy


def test_a_compiled_grammar_is_measured(service: GrammarService) -> None:
    """A literal of 10,000 random letters takes some megabytes, and a short one next to nothing."""
    service.start(signs_card())
    letters = "".join(Random(1).choices("abcdefghijklmnop", k=10_000))
    service.submit(job("short", Regex(pattern="a")))
    short = wait_for_results(service, 1)["short"]
    service.submit(job("long", ChoiceGrammar(choices=[letters])))
    long = wait_for_results(service, 1)["long"]
    assert short.num_bytes < 1 << 20 < long.num_bytes < 40 << 20


def test_grammars_are_refused_without_a_usable_tokenizer(
    service: GrammarService,
) -> None:
    service.start(replace(signs_card(), tokenizer=b'{"model": "none"}'))
    service.submit(job("any", Regex(pattern="a")))
    result = wait_for_results(service, 1)["any"].result
    assert isinstance(result, InvalidRequest)
    assert "this model cannot be constrained" in result.message


def test_results_after_close_are_dropped() -> None:
    service = GrammarService(TIMEOUT_S)
    service.submit(job("late", Regex(pattern="a")))
    service.close()
    other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    os.dup2(other, service.fd)  # another owner has this number now
    before = set(threading.enumerate())
    service.start(signs_card())
    assert eventually(
        lambda: len(set(threading.enumerate()) - before) < NUM_THREADS, within_s=WAIT_MS / 1e3
    ), "the thread that did the job has not ended"
    with pytest.raises(BlockingIOError):
        os.eventfd_read(other)
    for fd in {other, service.fd}:
        os.close(fd)


DEEP = """
import json, select
from engine_core.admission.grammar_cache import CompileJob
from engine_core.grammar.service import NUM_THREADS, GrammarService
from protocol.engine.grammar import Grammar, JsonSchema, Lark
from tests.support.grammars import ids_of, signs_card
links = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(15_000)}
schema = {"$ref": "#/$defs/d0", "$defs": links | {"d15000": {"type": "string"}}}
rules = "start: r0\\n" + "".join(f"r{n}:r{n + 1}\\n" for n in range(4_500)) + 'r4500: "a"'
service = GrammarService(60.0)
service.start(signs_card())
bodies = [JsonSchema(text=json.dumps(schema)), Lark(text=rules)]
for n, body in enumerate(bodies):
    service.submit(CompileJob(bytes([n]), Grammar(body=body)))
while bodies:
    select.select([service.fd], [], [], 60)
    for compiled in service.drain():
        matcher = compiled.result.start()
        matcher.consume(ids_of('"a'[compiled.digest[0]])[0])
        assert matcher.error is None, matcher.error
        bodies.pop()
"""


def test_a_deep_grammar_within_bounds_does_not_overflow_the_stack() -> None:
    """The grammars are compiled in another process, because a stack overflow would end it."""
    ran = subprocess.run([sys.executable, "-c", DEEP], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
