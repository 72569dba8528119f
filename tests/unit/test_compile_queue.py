"""The queue of grammars: turns between accounts, time limits, and what a compilation keeps."""

from __future__ import annotations

from engine_core.grammar.compile_queue import CompileQueue
from engine_core.grammar.jobs import CompiledGrammar, CompileJob
from engine_core.grammar.meter import CompileMeter
from protocol.engine.grammar import Grammar, Regex
from protocol.wire.errors import InvalidRequest, Overloaded

TIMEOUT_S = 10.0


def job(name: str, account: str = "") -> CompileJob:
    return CompileJob(name.encode(), Grammar(body=Regex(pattern=name)), account)


def a_queue(*jobs: CompileJob, max_per_account: int = 2, at: float = 0.0) -> CompileQueue:
    queue = CompileQueue(TIMEOUT_S, max_per_account)
    for each in jobs:
        queue.add(each, at)
    return queue


def started(queue: CompileQueue, now: float = 0.0) -> str | None:
    found = queue.start(now)
    return None if found is None else found.digest.decode()


def kinds(refusals: list[CompiledGrammar]) -> dict[str, type]:
    return {each.digest.decode(): type(each.result) for each in refusals}


# ---- turns
def test_accounts_take_turns() -> None:
    flood = [job(f"a{n}", "alice") for n in range(20)]
    queue = a_queue(*flood, job("b0", "bob"), job("b1", "bob"), max_per_account=9)
    assert [started(queue) for _ in range(5)] == ["a0", "b0", "a1", "b1", "a2"]


def test_one_account_never_uses_the_last_thread() -> None:
    queue = a_queue(*(job(f"a{n}", "alice") for n in range(20)))
    assert [started(queue) for _ in range(3)] == ["a0", "a1", None]
    queue.add(job("b0", "bob"), 0.0)
    assert started(queue) == "b0"
    queue.finish(b"a0")
    assert started(queue) == "a2"


def test_a_grammar_of_two_accounts_is_compiled_once_at_the_earlier_turn() -> None:
    queue = a_queue(*(job(f"a{n}", "alice") for n in range(9)), job("a8", "bob"), job("b", "bob"))
    assert [started(queue) for _ in range(4)] == ["a0", "a8", "a1", "b"]
    for name in (b"a0", b"a1"):
        queue.finish(name)
    assert started(queue) == "a2"
    assert "a8" not in [started(queue) for _ in range(9)]


# ---- time limits
def test_only_a_job_that_itself_ran_too_long_is_a_bad_request() -> None:
    queue = a_queue(*(job(f"slow{n}", "alice") for n in range(4)), at=100.0)
    assert [started(queue, 104.0) for _ in range(3)] == ["slow0", "slow1", None]
    assert queue.drop_overdue(110.0) == []
    assert kinds(queue.drop_overdue(110.1)) == {"slow2": Overloaded, "slow3": Overloaded}
    assert queue.drop_overdue(114.0) == []
    assert kinds(queue.drop_overdue(114.1)) == {"slow0": InvalidRequest, "slow1": InvalidRequest}
    assert not queue.is_awaited
    queue.finish(b"slow0")
    assert started(queue) is None, "a dropped job must not be compiled"


def test_a_small_grammar_is_not_refused_because_others_are_slow() -> None:
    """Both threads of a flood are stuck. The other account's job gets the third thread at once."""
    queue = a_queue(*(job(f"slow{n}", "alice") for n in range(100)))
    assert [started(queue) for _ in range(3)] == ["slow0", "slow1", None]
    queue.add(job("small", "bob"), 9.9)
    assert started(queue, 9.9) == "small"
    queue.finish(b"small")
    assert "small" not in kinds(queue.drop_overdue(60.0))


def test_a_grammar_that_still_runs_after_its_refusal_is_not_compiled_again() -> None:
    queue = a_queue(job("slow"))
    assert started(queue) == "slow"
    assert kinds(queue.drop_overdue(11.0)) == {"slow": InvalidRequest}
    queue.add(job("slow"), 12.0)
    assert started(queue, 12.0) is None
    assert queue.is_awaited
    assert kinds(queue.drop_overdue(12.0)) == {"slow": InvalidRequest}
    queue.finish(b"slow")
    queue.add(job("slow"), 13.0)
    assert started(queue, 13.0) == "slow"


# ---- what a compilation keeps
class FakeHeap:
    """The bytes in use on a heap that a test changes."""

    def __init__(self) -> None:
        self.used = 1000

    def __call__(self) -> int:
        return self.used


def test_a_compilation_that_runs_alone_is_measured_exactly() -> None:
    heap = FakeHeap()
    meter = CompileMeter(heap)
    meter.start(b"a")
    heap.used += 40
    assert meter.finish(b"a") == 40
    meter.start(b"b")
    heap.used -= 30  # the engine has dropped something meanwhile
    assert meter.finish(b"b") == 0


def test_what_concurrent_compilations_free_does_not_hide_what_one_keeps() -> None:
    heap = FakeHeap()
    meter = CompileMeter(heap)
    meter.start(b"fails")
    heap.used += 500
    meter.start(b"kept")
    heap.used += 70
    heap.used -= 500
    meter.finish(b"fails")
    assert meter.finish(b"kept") >= 70
