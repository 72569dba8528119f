"""Disaggregation: engine P computes a prompt, and engine D fetches its K/V and answers."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.kv import fetches, leases
from engine_core.kv.peers import PeerCluster
from protocol.engine.grammar import Regex
from protocol.worker.kv import (
    KVCancel,
    KVExport,
    KVFailure,
    KVFetch,
    KVFetched,
    KVReport,
    KVWithdraw,
)
from tests.support.echo_images import PLACEHOLDER, image_of
from tests.support.engines import Bench, answer, repetitive_token
from tests.support.grammars import text_of
from tests.support.handover import ClusterMember, KVNetwork
from tests.support.pair import PROMPT, HandoffPair


def reused_tokens(bench: Bench, number: int) -> tuple[int, int]:
    """Return the (cached, fetched) tokens in the usage of the last output."""
    usage = bench.usage(number)
    return usage.cached_tokens, usage.fetched_tokens


def num_computed(bench: Bench) -> int:
    return bench.engine.stats().num_computed_tokens


# ---- the normal course
def test_a_prompt_is_computed_once_and_its_answer_is_that_of_one_engine() -> None:
    pair = HandoffPair()
    handle = pair.prefill()
    assert pair.p.engine.stats().leases == 1
    number = pair.decode(handle, max_tokens=9)
    pair.move()
    pair.d.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    assert reused_tokens(pair.d, number) == (29, 29)
    assert num_computed(pair.p) == 29
    assert (
        num_computed(pair.d) == 9
    )  # the prompt's last token, and all tokens of the answer except the last
    stats = pair.d.engine.stats()
    assert (stats.num_fetched_tokens, stats.num_fetched_bytes) == (29, 800)
    assert pair.p.engine.stats().num_leases_ended == {"taken": 1}
    assert pair.is_free()


@pytest.mark.parametrize("fault", ["", "lost"])
def test_a_decode_engine_encodes_images_only_if_it_computes_the_prompt(fault: str) -> None:
    prompt = [1, 2, 3, *[PLACEHOLDER] * 6, *range(10, 25)]
    image, other = image_of("a", (3, 6)), image_of("b", (3, 6))
    alone = Bench(image_rows=64)
    alone.attach(image)
    expected = alone.add(prompt, attachments=[image], max_tokens=9)
    alone.run()
    pair = HandoffPair({"image_rows": 64}, {"image_rows": 64})
    pair.p.attach(image)
    pair.d.attach(image, other)
    handle = pair.prefill(prompt, attachments=[image])
    number = pair.decode(handle, prompt, attachments=[image], max_tokens=9)
    pair.move(fault)
    pair.run()
    assert pair.d.tokens(number) == alone.tokens(expected)
    images = [bench.engine.images.num_encoded for bench in (pair.p, pair.d)]
    assert images == [1, 1 if fault else 0]
    refusal = pair.d.refusal(prompt, kv_handle=handle, attachments=[other])
    assert "belongs to another prompt" in refusal.error.message
    assert fault or pair.is_free()


@pytest.mark.parametrize(
    ("prefilled", "decoded"), [*((n, n) for n in range(2, 19)), (12, 30), (18, 17)]
)
def test_a_handle_covers_its_prompt_except_the_last_token(prefilled: int, decoded: int) -> None:
    """This holds for prompts of any length, also if D's prompt is longer or shorter than P's."""
    pair = HandoffPair()
    prompt = PROMPT[:decoded]
    number = pair.decode(pair.prefill(PROMPT[:prefilled]), prompt, max_tokens=5)
    pair.run()
    fetched = min(prefilled, decoded) - 1
    assert pair.d.tokens(number) == answer(prompt, 5)
    assert (num_computed(pair.p), reused_tokens(pair.d, number)) == (
        prefilled - 1,
        (fetched, fetched),
    )
    assert pair.is_free()


def test_a_prompt_of_one_token_is_not_handed_over() -> None:
    pair = HandoffPair()
    assert pair.prefill([7]) == ""
    assert pair.is_free()


def test_cached_blocks_are_not_fetched() -> None:
    pair = HandoffPair()
    pair.d.add(PROMPT[:10], kv_handle=pair.prefill(PROMPT[:10]), max_tokens=1)
    pair.run()
    number = pair.decode(pair.prefill(), max_tokens=4)
    command = pair.movers[1].commands[-1]
    assert isinstance(command, KVFetch)
    assert (len(command.blocks), command.source.first) == (6, 2)  # type: ignore[union-attr]
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 4)
    assert reused_tokens(pair.d, number) == (29, 21)


def test_a_fully_cached_prompt_fetches_nothing() -> None:
    pair = HandoffPair()
    prompt = PROMPT[:17]  # the last token begins a block
    pair.d.add(prompt, max_tokens=2)
    pair.d.run()
    number = pair.decode(pair.prefill(prompt), prompt, max_tokens=4)
    assert not pair.movers[1].commands
    pair.d.run()
    assert pair.d.tokens(number) == answer(prompt, 4)
    assert reused_tokens(pair.d, number) == (16, 0)


def test_fetched_blocks_are_findable_only_after_they_arrive() -> None:
    pair = HandoffPair()
    pair.decode(pair.prefill(), max_tokens=4)
    assert len(pair.d.engine.scheduler.pool.cache) == 0
    pair.move()
    assert len(pair.d.engine.scheduler.pool.cache) == 7


def test_several_readers_each_fetch_and_the_last_one_ends_the_lease() -> None:
    pair = HandoffPair(d={"prefix_cache": False})
    handle = pair.prefill(readers=3)
    numbers = [pair.decode(handle, max_tokens=3, seed=seed) for seed in range(3)]
    for left in (1, 1, 0):
        assert pair.p.engine.stats().leases == 1
        pair.move()
        assert pair.p.engine.stats().leases == left
    pair.run()
    for seed, number in enumerate(numbers):
        assert pair.d.tokens(number) == answer(PROMPT, 3, seed)


@pytest.mark.parametrize("depth", [1, 2])
def test_other_requests_stream_while_a_prompt_is_fetched(depth: int) -> None:
    pair = HandoffPair(d={"steps_in_flight": depth, "max_slots": 2})
    other = pair.d.add([40, 41], max_tokens=30, ignore_eos=True)
    pair.d.step()
    number = pair.decode(pair.prefill(), max_tokens=9)
    before = len(pair.d.tokens(other))
    for _ in range(10):
        pair.d.step()
    assert len(pair.d.tokens(other)) == before + 10
    assert pair.d.engine.stats().running == 2
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    assert len(pair.d.tokens(other)) == 30


def test_a_fetched_prompt_streams_before_long_prompts_are_computed() -> None:
    pair = HandoffPair(d={"token_budget": 8})
    pair.d.add([50] * 100, max_tokens=1)
    number = pair.decode(pair.prefill(), max_tokens=3)
    pair.move()
    while pair.d.in_flight:
        pair.d.finish()
    pair.d.step()
    assert len(pair.d.tokens(number)) == 1


def test_a_constrained_answer_continues_from_a_fetched_prompt() -> None:
    pair = HandoffPair()
    handle = pair.prefill()
    number = pair.d.add(PROMPT, kv_handle=handle, grammar=Regex(pattern="[ab]{4}c"), max_tokens=9)
    pair.d.compile()
    pair.run()
    assert text_of(pair.d.tokens(number)).endswith("c")
    assert reused_tokens(pair.d, number) == (29, 29)


def test_drafts_are_guessed_from_a_fetched_prompt() -> None:
    options = {"speculation": "ngram", "ngram_min": 1, "sample": repetitive_token}
    pair = HandoffPair(d=options, p={"sample": repetitive_token})
    number = pair.decode(pair.prefill(), max_tokens=60, ignore_eos=True)
    pair.run()
    alone = Bench(sample=repetitive_token)
    plain = alone.add(PROMPT, max_tokens=60, ignore_eos=True)
    alone.run()
    assert pair.d.tokens(number) == alone.tokens(plain)
    assert pair.d.engine.stats().num_accepted_tokens > 10


def test_a_fetch_fills_the_blocks_after_those_that_the_draft_model_has_not_computed() -> None:
    """The cached blocks come from a request that did not use the draft model."""
    pair = HandoffPair(d={"speculation": "model"})
    pair.d.add(PROMPT[:10], max_tokens=1)
    (request,) = pair.d.engine.open_requests
    request.uses_draft_model = False
    pair.d.run()
    number = pair.decode(pair.prefill(), max_tokens=9)
    (request,) = pair.d.engine.open_requests
    assert (request.uses_draft_model, request.num_computed) == (True, 8)
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)


def test_a_prompt_with_logprobs_is_computed_here() -> None:
    pair = HandoffPair()
    number = pair.decode(pair.prefill(), max_tokens=2, prompt_logprobs=0)
    assert not pair.movers[1].commands
    pair.d.run()
    assert reused_tokens(pair.d, number) == (0, 0)


def test_a_preempted_request_is_computed_again_and_fetches_nothing() -> None:
    pair = HandoffPair(d={"num_blocks": 17, "prefix_cache": False})
    number = pair.decode(pair.prefill(), max_tokens=24, ignore_eos=True)
    pair.move()
    pair.d.add([90] * 8, priority=-1, max_tokens=50, ignore_eos=True)
    pair.run()
    assert len([each for each in pair.movers[1].commands if isinstance(each, KVFetch)]) == 1
    usage = pair.d.usage(number)
    assert usage.preemptions == 1
    assert pair.d.tokens(number) == answer(PROMPT, 24)


def test_a_fetching_request_is_never_preempted() -> None:
    pair = HandoffPair(d={"num_blocks": 17})
    number = pair.decode(pair.prefill(), max_tokens=3)
    other = pair.d.add([90] * 8, priority=-1, max_tokens=50, ignore_eos=True)
    for _ in range(60):
        pair.d.step()
    assert pair.d.engine.stats().num_preemptions == 1, "the other one has no more blocks"
    assert pair.d.engine.stats().fetching == 1
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 3)
    assert len(pair.d.tokens(other)) == 50


# ---- failures
def test_a_failed_fetch_is_computed_locally_in_zeroed_blocks() -> None:
    pair = HandoffPair()
    number = pair.decode(pair.prefill(), max_tokens=9)
    pair.move("damaged")
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    assert reused_tokens(pair.d, number) == (0, 0)
    assert pair.d.engine.stats().num_fetches_failed == {"damaged": 1}


def test_a_failed_fetch_is_an_error_with_its_reason_if_configured() -> None:
    pair = HandoffPair(d={"kv_on_failure": "error"})
    number = pair.decode(pair.prefill(), max_tokens=9)
    pair.move("unreachable")
    error = pair.d.last_output(number).error
    assert error.code == "step_failed"
    assert error.message == (
        "the prompt's K/V could not be fetched (unreachable: by request of the test)"
    )
    assert pair.d.engine.is_idle


def test_an_aborted_fetch_ends_at_once_and_frees_its_blocks_with_the_report() -> None:
    pair = HandoffPair()
    number = pair.decode(pair.prefill(), max_tokens=9)
    free = pair.d.engine.stats().free_blocks
    pair.d.abort(number)
    assert pair.d.last_output(number).finish == "abort"
    pair.d.send_kv_commands()
    assert pair.movers[1].commands[-1] == KVCancel(job=1)
    assert pair.d.engine.stats().free_blocks == free
    assert not pair.d.engine.is_idle
    pair.move()
    assert pair.d.engine.stats().free_blocks == pair.d.engine.stats().total_blocks
    assert pair.d.engine.is_idle


def test_a_report_on_a_job_that_is_not_open_raises() -> None:
    pair = HandoffPair()
    pair.decode(pair.prefill(), max_tokens=9)
    pair.move()
    with pytest.raises(RuntimeError, match="job 1, which is not open"):
        pair.d.on_kv_report(KVReport(fetched=[KVFetched(1, 0, 0.0, "echo")]))
    with pytest.raises(RuntimeError, match="job 9, which is not open"):
        pair.d.on_kv_report(KVReport(failed=[KVFailure(9, "expired", "")]))


def test_the_age_of_the_oldest_fetch_is_reported() -> None:
    pair = HandoffPair()
    handle = pair.prefill()
    pair.d.tick(100.0)
    pair.decode(handle, max_tokens=9)
    assert pair.d.engine.kv_transfers.fetches.oldest_s(107.0) == 7.0
    pair.move()
    assert pair.d.engine.kv_transfers.fetches.oldest_s(108.0) == 0.0


# ---- leases
def test_a_lease_expires_unless_it_is_renewed() -> None:
    pair = HandoffPair(p={"kv_lease_s": 30})
    handle = pair.prefill()
    pair.p.tick(29)
    pair.p.engine.keep_kv([handle])
    pair.p.tick(58)
    assert pair.p.engine.stats().leases == 1
    pair.p.tick(60)
    assert pair.p.engine.stats().num_leases_ended == {"expired": 1}
    assert isinstance(pair.movers[0].commands[-1], KVWithdraw)
    pair.p.engine.keep_kv([handle])  # too late; ignored
    assert pair.is_free()


def test_a_draining_engine_waits_for_leases_and_does_not_renew_them() -> None:
    pair = HandoffPair(p={"kv_lease_s": 30})
    handle = pair.prefill()
    pair.p.engine.drain()
    pair.p.tick(29)
    pair.p.engine.keep_kv([handle])
    assert not pair.p.engine.is_idle
    pair.p.tick(31)
    assert pair.p.engine.is_idle


def test_unknown_handles_are_ignored() -> None:
    pair, other = HandoffPair(), HandoffPair()
    pair.prefill()
    foreign = other.prefill()
    for handle in (foreign, "", "nonsense"):
        pair.p.engine.keep_kv([handle])
        pair.p.engine.release_kv([handle])
        pair.d.engine.release_kv([handle])
    Bench().engine.release_kv([foreign])
    assert pair.p.engine.stats().leases == 1


def test_a_handle_of_another_epoch_is_ignored() -> None:
    pair = HandoffPair()
    handle = pair.prefill()
    cluster = PeerCluster(b"k" * 32, epoch="p, anew", endpoint=None)
    engine = Bench(place=ClusterMember(pair.air, cluster)).engine
    engine.release_kv([handle])
    assert not engine.drain_kv_commands()


def test_a_lease_is_withdrawn_before_its_blocks_are_reused() -> None:
    """The next plan may already reuse blocks of an expired lease."""
    pair = HandoffPair(p={"num_blocks": 9, "prefix_cache": False})
    pair.prefill()
    pair.p.add(PROMPT, kv_readers=1)
    assert pair.p.plan() is None, "there are too few free blocks"
    pair.p.engine.tick(31)
    plan = pair.p.engine.plan()
    assert isinstance(pair.p.engine.drain_kv_commands()[0], KVWithdraw)
    exported = pair.movers[0].commands[0]
    assert isinstance(exported, KVExport)
    assert set(exported.blocks.tolist()) & set(plan.zero_blocks.tolist())


def test_a_lease_is_exported_before_the_step_that_completes_it_and_withdrawn_on_abort() -> None:
    """A reader may reach P's worker before a message that P's engine sends after the step."""
    pair = HandoffPair(p={"token_budget": 16})
    number = pair.p.add(PROMPT, kv_readers=1)
    commands = pair.movers[0].commands
    assert pair.p.plan() is not None
    assert not commands, "13 tokens remain for another step"
    pair.p.finish()
    assert pair.p.plan() is not None
    exported = commands[0]
    assert isinstance(exported, KVExport)
    pair.p.abort(number)
    pair.p.send_kv_commands()
    assert commands[1:] == [KVWithdraw(lease=exported.lease)]
    pair.p.run()
    assert pair.is_free()
    assert not pair.air.exports


def crowded(**p: Any) -> HandoffPair:
    """Return a pair whose P has 16 blocks, 12 of them leased."""
    pair = HandoffPair(p={"role": "both", "num_blocks": 17, **p})
    for first in (1, 31, 61):
        pair.prefill(list(range(first, first + 17)))
    assert pair.p.engine.stats().leased_blocks == 12
    return pair


def test_the_oldest_lease_yields_before_a_running_request_is_preempted() -> None:
    pair = crowded()
    pair.p.add([90] * 15, max_tokens=30, ignore_eos=True)
    pair.p.run()
    stats = pair.p.engine.stats()
    assert (stats.num_preemptions, stats.num_leases_ended) == (0, {"yielded": 2})


def test_leases_beyond_their_share_yield_to_a_waiting_request() -> None:
    pair = crowded()
    pair.p.add([90] * 30, max_tokens=1)
    pair.p.step()
    assert pair.p.engine.stats().num_leases_ended == {"yielded": 1}
    pair.p.add([91] * 60, max_tokens=1)
    assert pair.p.step() is None, "the other leases are within their share"
    assert pair.p.engine.stats().leased_blocks == 8


def test_a_request_with_readers_waits_for_the_first_terms_of_leases() -> None:
    pair = crowded()
    handles = [pair.prefill([9, 8, 7])]  # renewed below
    number = pair.p.add(list(range(50, 80)), kv_readers=1)
    assert pair.p.step() is None
    pair.p.tick(20)
    pair.p.engine.keep_kv(handles)
    assert pair.p.step() is None
    pair.p.tick(31)
    assert pair.p.engine.stats().num_leases_ended == {"expired": 3}
    pair.p.run()
    assert pair.p.last_output(number).kv_handle


# ---- refusals
def refusal(bench: Bench, prompt: list[int] = PROMPT, **fields: Any) -> str:
    reply = bench.refusal(prompt, **fields)
    assert (reply.error.code, reply.error.param) == ("invalid_request", "kv_transfer_params")
    assert "\n" not in reply.error.message
    return reply.error.message


def test_an_engine_refuses_requests_of_another_role() -> None:
    pair = HandoffPair()
    assert "role prefill" in refusal(pair.p, max_tokens=5)
    assert "role prefill" in refusal(pair.p, kv_handle=pair.prefill())
    assert "role decode" in refusal(pair.d, kv_readers=1)
    assert "cannot have kv_readers" in refusal(
        Bench(place=pair.air.member("x")), kv_readers=1, kv_handle=pair.prefill()
    )


@pytest.mark.parametrize("fields", [{"kv_readers": 1}, {"kv_handle": "x"}])
def test_an_engine_without_a_cluster_names_the_missing_part(fields: dict[str, Any]) -> None:
    assert "this engine transfers no K/V" in refusal(Bench(), **fields)
    place = ClusterMember(KVNetwork(), PeerCluster(b"k" * 32, epoch="e", endpoint=None))
    assert "worker transfers none" in refusal(Bench(place=place), **fields)


def test_a_worker_that_exports_nothing_can_still_fetch() -> None:
    pair = HandoffPair()
    bench = Bench(place=pair.air.member("x", address=""))
    assert "exports none" in refusal(bench, kv_readers=1)
    bench.add(PROMPT, kv_handle=pair.prefill())


@pytest.mark.parametrize("readers", [-1, 1025])
def test_the_number_of_readers_is_bounded(readers: int) -> None:
    assert "0 to 1,024" in refusal(HandoffPair().p, kv_readers=readers)


def test_a_handle_is_refused_for_another_prompt_or_namespace() -> None:
    pair = HandoffPair()
    handle = pair.prefill(namespace="key")
    d = pair.d
    assert "another prompt" in refusal(d, [9, *PROMPT], namespace="key", kv_handle=handle)
    assert "another prompt" in refusal(d, kv_handle=handle)
    assert "29 tokens, but the prompt has 28" in refusal(d, PROMPT[:28], kv_handle=handle)
    assert "not written by an engine" in refusal(d, kv_handle="AQ" * 40)
    d.add(PROMPT, namespace="key", kv_handle=handle)


def test_an_error_about_different_layouts_names_both() -> None:
    pair = HandoffPair()
    other = Bench(place=pair.air.member("x", layout=b"another", layout_text="blocks of 8"))
    message = refusal(other, kv_handle=pair.prefill())
    assert "echo, blocks alike there; blocks of 8 here" in message


def test_a_handle_of_another_cluster_is_refused() -> None:
    pair = HandoffPair()
    endpoint = pair.air.member("x").cluster.endpoint
    place = ClusterMember(pair.air, PeerCluster(b"another" * 5, epoch="x", endpoint=endpoint))
    assert "of this cluster" in refusal(Bench(place=place), kv_handle=pair.prefill())


def test_the_answer_parameters_of_a_remote_prefill_are_checked_but_unused() -> None:
    pair = HandoffPair()
    handle = pair.prefill(max_tokens=9, grammar=Regex(pattern="a+"), prompt_logprobs=2)
    assert handle
    assert not pair.p.jobs
    assert pair.p.tokens(1) == []
    pair.p.refusal(PROMPT, kv_readers=1, logit_bias={1000: 1.0})


# ---- the state tables
def test_a_fetch_ends_in_one_of_three_states() -> None:
    final = {fetches.FetchState.ARRIVED, fetches.FetchState.LOST, fetches.FetchState.DROPPED}
    assert fetches.FETCH_MACHINE.final == final


def test_each_event_that_ends_a_lease_has_a_cause() -> None:
    assert leases.LEASE_MACHINE.final == {leases.LeaseState.OVER}
    assert set(leases.CAUSES) == set(leases.LeaseEvent) - {leases.LeaseEvent.RENEW}


def test_a_request_moved_before_its_first_token_is_handed_over_as_a_new_one() -> None:
    pair = HandoffPair(p={"max_waiting": 1}, d={"max_waiting": 1})
    handles = [pair.prefill(PROMPT[:8]), pair.prefill(answer=[])]
    pair.d.add(PROMPT[:8], kv_handle=handles[0], max_tokens=4)
    number = pair.decode(handles[1], answer=[], max_tokens=4)
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 4)
    assert pair.d.usage(number).fetched_tokens == len(PROMPT) - 1
    assert pair.is_free()
