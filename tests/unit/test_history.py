"""The engine's history: timelines of requests, recorded steps, latencies, blocks by owner."""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import isclose
from typing import Any

import pytest

from engine_core.engine import Engine
from engine_core.history import requests as histories
from engine_core.history import steps as step_log
from engine_core.history.requests import SlotBind
from protocol.engine.encoding import MAX_STEP_INPUTS
from protocol.engine.messages import Account, GetStatus
from protocol.engine.stats import BlockCounts, EngineStats
from protocol.engine.timeline import AbortReason, PromptShare, StageSpan
from protocol.shared.latency import bounds_s, bucket, grown, quantiles
from tests.support.engines import CLIENT, repetitive_token
from tests.support.timelines import TimedBench, finish

ALICE, BOB = Account(name="alice"), Account(name="bob")


def a_bench(**options: object) -> TimedBench:
    bench = TimedBench(**{"prefix_cache": False, **options})  # type: ignore[arg-type]
    bench.tick(bench.now)
    return bench


def test_a_timeline_names_the_prompt_that_others_computed_meanwhile() -> None:
    bench = a_bench(token_budget=8)
    bench.add([1] * 20, labels=["long"], account=ALICE, max_tokens=2, ignore_eos=True)
    bench.timed_step()
    bench.add([2] * 3, labels=["short"], account=ALICE, max_tokens=3, ignore_eos=True)
    for _ in range(3):
        bench.timed_step()
    found = bench.timeline("short")
    assert (found.account, found.client, found.finish) == ("alice", "client", "")
    behind, sharing, own = found.groups
    long: dict[str, Any] = {"name": "long", "account": "alice", "prompt_tokens": 20}
    assert behind.prompts == [PromptShare(tokens=8, **long)]
    assert sharing.prompts == [PromptShare(tokens=4, **long)]
    assert [group.own_prefill for group in found.groups] == [0, 3, 0]
    assert [group.other_prefill for group in found.groups] == [8, 4, 0]
    assert (own.own_decodes, own.other_decodes) == (1, 1)
    assert [(group.start_s, group.end_s) for group in found.groups] == [
        (0.0, 0.25),
        (0.25, 0.5),
        (0.5, 0.75),
    ]
    assert (own.first_step, own.steps, own.longest_s) == (4, 1, 0.25)
    assert found.first_token_s == 0.5


def test_open_and_ended_requests_are_found_by_the_beginning_of_a_name() -> None:
    bench = a_bench()
    for name in ("chatcmpl-7f3a9c", "chatcmpl-7f3b00"):
        bench.add([1, 2], max_tokens=1, ignore_eos=True, labels=[name])
    while bench.engine.open_requests:
        bench.timed_step()
    bench.add([1, 2], max_tokens=9, ignore_eos=True, labels=["chatcmpl-7f3aff", "mine"])

    def begun(text: str) -> list[tuple[str, str]]:
        work = bench.engine.compute_timelines([text], bytes.decode, are_beginnings=True)
        return [(each.name, each.finish) for each in finish(work)]

    assert begun("chatcmpl-7f3a") == [("chatcmpl-7f3aff", ""), ("chatcmpl-7f3a9c", "length")]
    assert begun("7f3b") == [("chatcmpl-7f3b00", "length")]
    assert begun("mine") == [("chatcmpl-7f3aff", "")]
    assert begun("7f3") == begun("cmpl-7f3") == [], "too short"
    assert bench.timelines("chatcmpl-7f3a") == []


def test_steps_with_the_same_rows_are_one_entry() -> None:
    bench = a_bench()
    for _ in range(3):
        bench.add([1, 2], max_tokens=9, ignore_eos=True, labels=["x"])
    for _ in range(4):
        bench.timed_step(0.125)
    prompts, decodes = bench.engine.history.steps.after(0)
    assert (prompts.first, prompts.count, prompts.prefill, prompts.decode) == (1, 1, 6, 0)
    assert (decodes.first, decodes.count, decodes.prefill, decodes.decode) == (2, 3, 0, 9)
    assert (decodes.busy_s, decodes.longest_s, decodes.ended_s) == (0.375, 0.125, bench.now)


def test_a_report_continues_after_the_last_step_of_the_one_before() -> None:
    bench = a_bench()
    bench.add([1, 2], max_tokens=9, ignore_eos=True)
    bench.timed_step()
    bench.timed_step()
    log = bench.engine.history.steps
    assert [step.first for step in log.after(0)] == [1, 2]
    bench.timed_step()
    bench.timed_step()
    assert [(step.first, step.count) for step in log.after(2)] == [(3, 2)]
    assert log.after(4) == []


def test_a_new_owner_of_a_slot_starts_an_entry() -> None:
    """Its first step may have the same rows as the last one of the former owner."""
    bench = a_bench(max_slots=1)
    bench.add([1], max_tokens=3, ignore_eos=True, labels=["first"])
    bench.add([2], max_tokens=3, ignore_eos=True, labels=["second"])
    for _ in range(6):
        bench.timed_step(0.01)
    assert [(s.first, s.count) for s in bench.engine.history.steps.after(0)] == [(1, 3), (4, 3)]
    first, second = bench.timeline("first"), bench.timeline("second")
    assert [(g.own_decodes, g.other_decodes) for g in first.groups] == [(3, 0)]
    assert [(g.own_decodes, g.other_decodes) for g in second.groups] == [(0, 3), (3, 0)]
    assert [g.lack for g in second.groups] == ["slot", ""]


def test_the_stages_of_a_preempted_request_are_listed_in_order() -> None:
    bench = a_bench(num_blocks=9, token_budget=32)
    bench.add([1] * 12, max_tokens=16, ignore_eos=True, labels=["old"])
    bench.add([2] * 12, max_tokens=16, ignore_eos=True, labels=["young"])
    while not bench.engine.stats().num_preemptions:
        bench.timed_step()
    for _ in range(2):
        bench.timed_step()
    assert bench.timeline("young").stages[-1].stage == "preempted"
    bench.run()
    found = bench.timeline("young")
    assert found.finish == "length"
    assert found.preemptions == 1
    names = [span.stage for span in found.stages]
    assert [name for name in names if name != "queued"] == ["decode", "preempted"] or names[:3] == [
        "prefill",
        "decode",
        "preempted",
    ]
    assert all(a.end_s == b.start_s for a, b in zip(found.stages, found.stages[1:], strict=False))


def test_a_preempted_request_has_no_part_in_the_steps_of_its_slots_next_owner() -> None:
    bench = a_bench(token_budget=32, max_slots=1)
    bench.add([1] * 4, max_tokens=1, account=ALICE)
    bench.add([1] * 4, max_tokens=100, ignore_eos=True, labels=["first"], account=ALICE)
    for _ in range(60):
        bench.timed_step()
    bench.add([2] * 4, max_tokens=30, ignore_eos=True, labels=["second"], account=BOB)
    while bench.timeline("second").generated_tokens < 5:
        bench.timed_step()
    first, second = bench.timeline("first"), bench.timeline("second")
    assert first.preemptions == 1
    assert sum(g.own_decodes for g in first.groups) == first.generated_tokens - 1
    assert sum(g.own_decodes for g in second.groups) == second.generated_tokens - 1
    assert sum(g.other_decodes for g in first.groups) == second.generated_tokens - 1


def test_the_owner_of_a_slot_is_found_without_looking_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[SlotBind] = []

    class CountedBind(SlotBind):
        def __getattribute__(self, name: str) -> Any:
            looked_at.append(self)
            return super().__getattribute__(name)

    monkeypatch.setattr(histories, "SlotBind", CountedBind)
    bench = a_bench(max_slots=1)
    bench.add([1], max_tokens=9)
    bench.timed_step()
    (request,) = bench.engine.open_requests
    found = histories.RequestHistories()
    for step in range(1, 201):
        found.on_bound(request, step)
    looked_at.clear()
    owners = [found.owner(0, step) for step in (1, 57, 200)]
    assert [owner and owner.name for owner in owners] == [request.name] * 3
    assert found.owner(0, 0) is None
    assert len(looked_at) <= 4 * 8  # binary search in 200


def test_the_former_owners_of_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MAX_OWNERS", 20)
    monkeypatch.setattr(histories, "MAX_ENDED", 2)
    bench = a_bench(max_slots=4)
    bench.add([1] * 3, max_tokens=100, ignore_eos=True, labels=["long"])
    before = num_histories()
    for number in range(60):
        bench.add([1, number], max_tokens=1, labels=[f"short {number}"])
        bench.timed_step()
    assert num_histories() - before <= 20 + 4
    long = bench.timeline("long")
    assert sum(group.own_decodes for group in long.groups) == long.generated_tokens - 1


def num_histories() -> int:
    """Return the number of requests that this process remembers."""
    gc.collect()
    return sum(type(each) is histories.RequestHistory for each in gc.get_objects())


def test_a_timeline_is_kept_after_the_end_and_then_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(histories, "MAX_ENDED", 2)
    bench = a_bench()
    for name in "abc":
        bench.add([1, 2], max_tokens=2, ignore_eos=True, labels=[name, "all"])
        bench.timed_step()
        bench.timed_step()
    bench.pass_time(10.0)
    assert bench.timeline("c").ended_ago_s == 10.0
    assert bench.timeline("c").took_s == 0.5
    assert bench.timelines("a") == []
    assert [found.name for found in bench.timelines("all", "c")] == ["c", "b"]
    bench.pass_time(histories.MAX_ENDED_S)
    assert bench.timelines("all") == []


def test_a_request_that_never_had_a_slot_has_a_timeline() -> None:
    bench = a_bench(max_slots=1)
    bench.add([1, 2], max_tokens=50, ignore_eos=True)
    bench.timed_step()
    waiting = bench.add([3, 4], labels=["w"], account=BOB)
    bench.timed_step()
    found = bench.timeline("w")
    assert found.stages == [StageSpan(stage="queued", start_s=0.0, end_s=0.25)]
    assert (found.generated_tokens, found.first_token_s) == (0, None)
    bench.abort(waiting)
    assert bench.timeline("w").finish == "abort"


ABORTS: dict[AbortReason, Callable[[TimedBench, int], object]] = {
    "": lambda bench, number: bench.engine.abort(CLIENT, [number]),
    "disconnected": lambda bench, number: bench.engine.abort(CLIENT, [number], "disconnected"),
    "complete": lambda bench, number: bench.engine.abort(CLIENT, [number], "complete"),
    "by_id": lambda bench, number: bench.abort_by_label("r"),
    "client_lost": lambda bench, number: bench.engine.on_client_lost(CLIENT),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("reason", ABORTS)
def test_a_timeline_has_the_reason_of_an_abort(reason: AbortReason, steps: int) -> None:
    bench = a_bench()
    number = bench.add([1, 2], max_tokens=50, ignore_eos=True, labels=["r"])
    for _ in range(steps):
        bench.timed_step()
    ABORTS[reason](bench, number)
    found = bench.timeline("r")
    assert (found.finish, found.abort_reason) == ("abort", reason)


def test_the_timeline_of_a_request_that_was_not_aborted_has_no_reason() -> None:
    bench = a_bench()
    bench.add([1, 2], max_tokens=1, ignore_eos=True, labels=["r"])
    assert bench.timeline("r").abort_reason == ""
    bench.timed_step()
    found = bench.timeline("r")
    assert (found.finish, found.abort_reason) == ("length", "")


def test_a_timeline_says_that_its_first_steps_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_log, "MAX_RUNS", 3)
    monkeypatch.setattr(step_log, "MAX_RUN_S", 0.0)
    bench = a_bench()
    bench.add([1, 2], max_tokens=9, ignore_eos=True, labels=["x"])
    bench.timed_step()
    assert not bench.timeline("x").has_lost_steps
    for _ in range(5):
        bench.timed_step()
    found = bench.timeline("x")
    assert found.has_lost_steps
    assert [group.first_step for group in found.groups] == [4, 5, 6]


def test_the_log_is_bounded_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MAX_ROWS", 4)
    monkeypatch.setattr(step_log, "MAX_RUN_S", 0.0)
    bench = a_bench()
    for _ in range(2):
        bench.add([1, 2], max_tokens=9, ignore_eos=True)
    for _ in range(5):
        bench.timed_step()
    assert [run.first for run in bench.engine.history.steps] == [4, 5]


def test_drafts_are_counted_apart() -> None:
    bench = a_bench(speculation="ngram", sample=repetitive_token, max_drafts=3)
    bench.add([1, 2, 3] * 6, max_tokens=40, ignore_eos=True, labels=["x"])
    while bench.engine.num_open:
        bench.timed_step()
    usage = bench.last_output(1).usage
    assert usage is not None
    assert usage.draft_tokens > 0
    found = bench.timeline("x")
    assert sum(group.own_drafts for group in found.groups) == usage.draft_tokens
    assert sum(group.own_prefill for group in found.groups) == 18
    assert found.accepted_tokens == usage.accepted_tokens
    steps = bench.engine.history.steps.after(0)
    assert sum(step.draft for step in steps) == usage.draft_tokens
    computed = bench.engine.stats().num_computed_tokens
    assert sum(step.prefill + step.decode + step.draft for step in steps) == computed


def test_latencies_count_first_tokens_and_the_gaps_between_outputs() -> None:
    bench = a_bench()
    for _ in range(2):
        bench.add([1, 2], max_tokens=4, ignore_eos=True)
    bench.timed_step(2.0)
    for _ in range(3):
        bench.timed_step(0.25)
    history = bench.engine.history
    assert history.first_tokens[bucket(2.0)] == sum(history.first_tokens) == 2
    assert history.gaps[bucket(0.25)] == sum(history.gaps) == 6


def test_the_wait_after_a_preemption_is_a_gap() -> None:
    bench = a_bench(num_blocks=9, token_budget=32)
    for prompt in ([1] * 12, [2] * 12):
        bench.add(prompt, max_tokens=16, ignore_eos=True)
    while not bench.engine.stats().num_preemptions:
        bench.timed_step(0.25)
    bench.pass_time(50.0)
    bench.run()
    assert sum(bench.engine.history.gaps[bucket(40.0) :]) == 1


def block_counts(engine: Engine) -> BlockCounts:
    status = engine.status(
        GetStatus(request=1), now=0.0, stats=EngineStats(), client_name=bytes.hex
    )
    return status.blocks


def test_blocks_are_counted_by_owner() -> None:
    bench = a_bench(num_blocks=33, prefix_cache=True)
    counts = block_counts(bench.engine)
    assert (counts.requests, counts.leased, counts.cached, counts.free) == (0, 0, 0, 32)
    bench.add([1] * 16, max_tokens=30, ignore_eos=True)
    bench.timed_step()
    assert block_counts(bench.engine).requests == 4
    bench.abort(1)
    bench.run()
    counts = block_counts(bench.engine)
    assert (counts.requests, counts.cached) == (0, 4)
    assert counts.free == 28


# ---- the pure parts


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.01, 0.25, 3.0, 700.0])
def test_a_latency_lies_within_the_bounds_of_its_bucket(seconds: float) -> None:
    low, high = bounds_s(bucket(seconds))
    assert low <= seconds <= high or isclose(seconds, low) or isclose(seconds, high)


def test_quantiles_are_read_from_counts() -> None:
    counts = [0] * 80
    assert quantiles(counts, [0.5]) is None
    assert quantiles([], [0.5]) is None
    counts[bucket(0.1)], counts[bucket(5.0)] = 90, 10
    shares = {0.0: 0.1, 0.5: 0.1, 0.9: 0.1, 0.95: 5.0, 1.0: 5.0}
    found = quantiles(counts, list(shares))
    assert found is not None
    assert found == sorted(found)
    for seconds, near in zip(found, shares.values(), strict=True):
        assert near / 1.2 <= seconds <= near * 1.2
    assert grown([1, 2, 0], [1, 5, 3]) == [0, 3, 3]
    assert grown([], [1, 5]) == [1, 5]
    assert grown([9, 9], [1, 5]) == [1, 5]


def test_the_client_of_a_timeline_is_named() -> None:
    bench = a_bench()
    bench.add([1, 2], client=CLIENT, labels=["x"])
    work = bench.engine.compute_timelines(["x"], {CLIENT: "gateway-7"}.__getitem__)
    assert finish(work)[0].client == "gateway-7"


def test_steps_that_encode_are_recorded_between_those_that_generate() -> None:
    bench = a_bench(token_budget=8)
    bench.add([1] * 4, max_tokens=9, ignore_eos=True)
    bench.timed_step()
    bench.encode([2] * 5, [2] * 6, labels=["texts"])
    bench.encode([3] * 2, labels=["other"])
    for _ in range(4):
        bench.timed_step(0.5)
    found = bench.timeline("texts")
    assert (found.finish, found.prompt_tokens, found.generated_tokens) == ("stop", 11, 0)
    assert sum(group.own_prefill for group in found.groups) == 11
    assert sum(group.other_prefill for group in found.groups) == 2
    assert any(group.other_decodes for group in found.groups)
    summaries = bench.engine.history.steps.after(1)
    assert sum(each.prefill for each in summaries) == 13
    assert sum(each.decode for each in summaries) == 2


def test_the_log_forgets_old_steps_that_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MAX_ROWS", 3)
    bench = a_bench(token_budget=8)
    for _ in range(5):
        bench.encode([2] * 4)
        bench.timed_step()
    bench.encode([2] * 4)
    bench.encode([3] * 4)
    bench.timed_step()
    assert [run.num_rows for run in bench.engine.history.steps] == [1, 2]


def test_steps_that_encode_take_as_much_memory_as_documented() -> None:
    bench = a_bench(token_budget=512)
    for _ in range(MAX_STEP_INPUTS):
        bench.encode([2])
    bench.timed_step()
    (run,) = bench.engine.history.steps
    assert list(run.parts) == [(order + 1, 1) for order in range(MAX_STEP_INPUTS)]
    assert len(run.encoded) * step_log.MAX_ROWS <= 16 * MAX_STEP_INPUTS << 20
