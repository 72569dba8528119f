"""Each fault in each state of a handoff: how the request ends, whether its prompt was fetched or
computed again, and what ended the lease.

The expected outcomes are the table in docs/contribute/split-failures.md. `python -m
tests.unit.test_handover_faults` writes this table again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_core.requests.request import RequestPhase
from protocol.engine.messages import Output
from tests.support.engines import CLIENT, Bench, answer
from tests.support.pair import PROMPT, HandoffPair

DOCUMENT = Path(__file__).parents[2] / "docs" / "contribute" / "split-failures.md"
BEGIN, END = "<!-- tests/unit/test_handover_faults.py -->\n", "<!-- end -->\n"
NUM_TOKENS = 24
LEASE_S = 30.0


@dataclass
class FaultCase:
    """A request that P hands to D, into which a test injects a fault."""

    pair: HandoffPair
    #: Number of the request at P.
    at_p: int = 0
    #: Number of the request at D; 0 if D has not accepted it.
    at_d: int = 0
    handle: str = ""
    is_aborted: bool = False
    #: Whether the gateway, which receives all outputs, is lost.
    is_gone: bool = False

    def phase(self, bench: Bench, number: int) -> RequestPhase:
        request = bench.engine.open_requests.find(CLIENT, number)
        return RequestPhase.FINISHED if request is None else request.phase

    def complete(self) -> None:
        """Do the rest of the gateway's part, until the handoff is over."""
        self.pair.run()
        self.read_handle()
        if self.handle and not self.at_d and not self.is_aborted and not self.is_gone:
            self.send_to_d()
        self.pair.run()
        self.pair.p.tick(3 * LEASE_S)
        self.pair.run()

    def read_handle(self) -> None:
        if news := self.pair.p.outputs[CLIENT, self.at_p]:
            self.handle = news[-1].kv_handle

    def send_to_d(self) -> None:
        number = self.pair.d.try_add(
            PROMPT, kv_handle=self.handle, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        if isinstance(number, int):
            self.at_d = number


# ---- the states, each reached from the one before
def waits_at_p(case: FaultCase) -> None:
    number = case.pair.p.add(PROMPT, kv_readers=1)
    case.at_p = number
    assert case.phase(case.pair.p, number) is RequestPhase.WAITING


def computed(case: FaultCase) -> None:
    waits_at_p(case)
    case.pair.p.plan()
    assert case.phase(case.pair.p, case.at_p) is RequestPhase.RUNNING


def kept(case: FaultCase) -> None:
    computed(case)
    case.pair.p.run()
    case.read_handle()
    assert case.pair.p.engine.stats().leases == 1


def waits_at_d(case: FaultCase) -> None:
    kept(case)
    case.send_to_d()
    assert case.phase(case.pair.d, case.at_d) is RequestPhase.WAITING


def fetched(case: FaultCase) -> None:
    waits_at_d(case)
    case.pair.d.plan()
    assert case.phase(case.pair.d, case.at_d) is RequestPhase.FETCHING


def is_here(case: FaultCase) -> None:
    fetched(case)
    case.pair.move()
    assert case.phase(case.pair.d, case.at_d) is RequestPhase.READY


def goes_on(case: FaultCase) -> None:
    is_here(case)
    case.pair.d.plan()
    assert case.phase(case.pair.d, case.at_d) is RequestPhase.RUNNING


STATES: dict[str, Callable[[FaultCase], None]] = {
    "waits at P": waits_at_p,
    "is computed": computed,
    "is kept by P": kept,
    "waits at D": waits_at_d,
    "is fetched": fetched,
    "is there": is_here,
    "goes on": goes_on,
}


# ---- the faults
def nothing(case: FaultCase) -> None:
    pass


def abort(case: FaultCase) -> None:
    case.is_aborted = True
    case.pair.p.abort(case.at_p)
    case.pair.d.abort(case.at_d)
    case.pair.p.engine.release_kv([case.handle])
    case.pair.p.send_kv_commands()
    case.pair.d.send_kv_commands()


def abort_too_late(case: FaultCase) -> None:
    p, d = case.pair.movers
    reports = [d.carry_out(job) for job in list(d.jobs)]
    abort(case)
    for report in reports:
        case.pair.d.on_kv_report(report)
    case.pair.p.on_kv_report(p.report_taken())


def lose_gateway(case: FaultCase) -> None:
    case.is_gone = True
    case.pair.p.engine.on_client_lost(CLIENT)
    case.pair.d.engine.on_client_lost(CLIENT)


def fail(case: FaultCase) -> None:
    case.pair.air.fault = "unreachable"


def expire(case: FaultCase) -> None:
    case.pair.p.tick(LEASE_S + 1)


def release(case: FaultCase) -> None:
    case.pair.p.engine.release_kv([case.handle])
    case.pair.p.send_kv_commands()


def crowd_p(case: FaultCase) -> None:
    crowd(case.pair.p)


def crowd_d(case: FaultCase) -> None:
    crowd(case.pair.d)


def crowd(bench: Bench) -> None:
    """Run a request of higher priority, whose answer takes all the blocks that it can get."""
    limits = bench.limits
    bench.add([90] * 8, priority=-1, max_tokens=limits.max_len - 8, ignore_eos=True, seed=5)
    for _ in range(limits.max_len):
        bench.step()


def drain_p(case: FaultCase) -> None:
    case.pair.p.engine.drain()


def drain_d(case: FaultCase) -> None:
    case.pair.d.engine.drain()


FAULTS: dict[str, tuple[Callable[[FaultCase], None], str]] = {
    "nothing": (nothing, "recompute"),
    "its client aborts": (abort, "recompute"),
    "its client aborts, and the fetch is done by then": (abort_too_late, "recompute"),
    "the gateway is gone": (lose_gateway, "recompute"),
    "fetches fail": (fail, "recompute"),
    "fetches fail, `--kv-on-failure error`": (fail, "error"),
    "30 s pass at P": (expire, "recompute"),
    "the handle is released": (release, "recompute"),
    "P's blocks are needed by a running answer": (crowd_p, "recompute"),
    "D's blocks are needed by a running answer": (crowd_d, "recompute"),
    "P drains": (drain_p, "recompute"),
    "D drains": (drain_d, "recompute"),
}
"""Name of the fault -> (function that causes it, kv_on_failure)."""


# ---- the outcome
def outcome(state: str, fault: str, **options: int) -> str:
    happen, policy = FAULTS[fault]
    case = FaultCase(
        HandoffPair(
            p={"role": "both", "num_blocks": 17, **options},
            d={"num_blocks": 17, "kv_on_failure": policy, "steps_in_flight": 2, **options},
        )
    )
    STATES[state](case)
    happen(case)
    case.complete()
    assert case.pair.is_free(), "a slot, block or lease was never released"
    for bench in (case.pair.p, case.pair.d):
        assert not bench.engine.stats().held_checkpoints, "a checkpoint was never released"
    leases = case.pair.p.engine.stats().num_leases_ended
    assert sum(leases.values()) <= 1
    return ", ".join([end_of(case), *(f"lease {cause}" for cause in leases)])


def end_of(case: FaultCase) -> str:
    bench, number = (case.pair.d, case.at_d) if case.at_d else (case.pair.p, case.at_p)
    news = bench.outputs[CLIENT, number]
    last = news[-1] if news else Output(request=number)
    if case.is_gone:
        assert not case.at_d or last.finish is None, "output was sent to a lost client"
        return "client gone"
    if case.is_aborted:
        assert last.finish == ("abort" if case.at_d or not case.handle else "length")
        return "aborted"
    if not case.at_d:
        return "refused by D"
    if last.finish == "error":
        return f"error `{last.error.code}`"
    assert bench.tokens(number) == answer_without_end()
    how = "fetched" if last.usage.fetched_tokens else "computed again"
    return f"answer: {how}" + ", preempted" * bool(last.usage.preemptions)


def answer_without_end() -> list[int]:
    tokens = answer(PROMPT, NUM_TOKENS)
    assert len(tokens) == NUM_TOKENS, "choose a prompt whose answer has no EOS"
    return tokens


HEAD = "| | " + " | ".join(f"**{state}**" for state in STATES) + " |"


def row(fault: str, **options: int) -> str:
    cells = [outcome(state, fault, **options) for state in STATES]
    return f"| **{fault}** | " + " | ".join(cells) + " |"


def documented() -> list[str]:
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_ends_a_request_as_documented(fault: str) -> None:
    assert row(fault) in documented()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_holds_if_the_model_has_a_recurrent_state(fault: str) -> None:
    assert row(fault, state_bytes=8, num_checkpoints=6, state_interval=16) in documented()


def test_the_documented_table_has_exactly_these_states_and_faults() -> None:
    head, line, *rows = documented()
    assert (head, line) == (HEAD, "|---" * (1 + len(STATES)) + "|")
    assert [entry.split("**")[1] for entry in rows] == list(FAULTS)


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    table = [HEAD, "|---" * (1 + len(STATES)) + "|", *map(row, FAULTS)]
    DOCUMENT.write_text(before + BEGIN + "\n".join(table) + "\n" + END + rest.partition(END)[2])
