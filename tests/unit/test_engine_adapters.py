"""LoRA adapters in the engine: who may use which, when a row is free, and what clients are sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_core.adapters import (
    AdapterReply,
)
from engine_core.requests.open_requests import OpenRequests
from engine_core.requests.request import Request
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.grammar import Regex
from protocol.engine.kv_events import BlockStored
from protocol.engine.messages import AdapterChanged, Refused
from protocol.worker.steps import NO_ADAPTER, AdapterReport
from tests.support.engines import CLIENT, Bench, a_card
from tests.support.handover import KVNetwork

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11]


def bench(*adapters: str, max_adapters: int = 2, **options: Any) -> Bench:
    return Bench(adapters=adapters, max_adapters=max_adapters, **options)


def error_of(reply: AdapterReply | None) -> tuple[str, str | None]:
    assert isinstance(reply, Refused)
    return reply.error.code, reply.error.param


def test_a_slot_names_the_row_and_generation_of_the_requests_adapter():
    scene = bench("fr", "de")
    for name in ("de", "", "fr"):
        scene.add(PROMPT, adapter=name, max_tokens=1)
    scene.run()
    binds = [init for plan in scene.plans for init in plan.bind]
    assert [(init.adapter, init.adapter_generation) for init in binds] == [
        (1, 1),
        (NO_ADAPTER, 0),
        (0, 1),
    ]


def test_an_unknown_adapter_is_refused_as_an_unknown_model():
    for scene in (Bench(), bench("fr")):
        assert error_of(scene.refusal(PROMPT, adapter="it")) == ("model_not_found", "model")


def test_prompts_are_shared_only_by_requests_with_the_same_adapter():
    scene = bench("fr", "de", max_adapters=3)
    cached = []
    for name in ("", "fr", "de", "", "fr", "de"):
        number = scene.add(PROMPT, adapter=name, max_tokens=1)
        scene.run()
        cached.append(scene.usage(number).cached_tokens)
    assert cached == [0, 0, 0, 8, 8, 8]


def test_a_changed_adapter_of_the_same_name_shares_no_prompts_with_the_former_one():
    scene = bench("fr")
    scene.add(PROMPT, adapter="fr", max_tokens=1)
    scene.run()
    assert scene.unload_adapter("fr") is None
    scene.run_adapter()
    assert scene.load_adapter("fr") is None
    scene.run_adapter()
    number = scene.add(PROMPT, adapter="fr", max_tokens=1)
    scene.run()
    assert scene.usage(number).cached_tokens == 0


def test_a_request_for_an_adapter_that_was_replaced_is_refused():
    scene = bench("fr")
    (meant,) = scene.engine.adapters.infos
    scene.add(PROMPT, adapter="fr", adapter_digest=meant.digest, max_tokens=1)
    scene.run()
    assert scene.unload_adapter("fr") is None
    scene.run_adapter()
    late = scene.refusal(PROMPT, adapter="fr", adapter_digest=meant.digest)
    assert error_of(late) == ("model_not_found", "model")
    assert scene.load_adapter("fr", "other") is None
    scene.run_adapter()
    (current,) = scene.engine.adapters.infos
    refusal = scene.refusal(PROMPT, adapter="fr", adapter_digest=meant.digest)
    assert (error_of(refusal), refusal.error.retry_after_s) == (("stale_adapter", None), 1)
    scene.add(PROMPT, adapter="fr", adapter_digest=current.digest, max_tokens=1)
    scene.add(PROMPT, adapter="fr", max_tokens=1)
    scene.run()


def test_published_blocks_name_the_adapter():
    scene = bench("fr", kv_events="ipc:///tmp/events", kv_events_namespace=[""])
    for name in ("", "fr"):
        scene.add(PROMPT, adapter=name, max_tokens=1)
        scene.run()
    events = [each for each in scene.engine.drain_kv_events() if isinstance(each, BlockStored)]
    assert [event.lora_name for event in events] == [None, "fr"]
    assert events[0].block_hashes != events[1].block_hashes


def test_a_handle_is_refused_for_a_request_with_another_adapter():
    air = KVNetwork()
    p, d = (bench("fr", "de", place=air.member(name)) for name in "pd")
    number = p.add(PROMPT, adapter="fr", kv_readers=1)
    p.run()
    handle = p.last_output(number).kv_handle
    for adapter in ("", "de"):
        refusal = d.refusal(PROMPT, adapter=adapter, kv_handle=handle)
        assert error_of(refusal) == ("invalid_request", "kv_transfer_params")
        assert "another prompt, namespace or adapter" in refusal.error.message
    d.add(PROMPT, adapter="fr", kv_handle=handle)


# ---- loading and unloading


def test_a_loaded_adapter_can_be_used_after_the_workers_report():
    scene = bench()
    assert scene.load_adapter("fr", "french", request=7) is None
    assert error_of(scene.refusal(PROMPT, adapter="fr")) == ("model_not_found", "model")
    assert not scene.engine.adapters.infos
    scene.run_adapter()
    (info,) = scene.engine.adapters.infos
    assert scene.adapters.replies == [(CLIENT, AdapterChanged(request=7, adapter=info))]
    assert (info.name, info.path, info.rank) == ("fr", "french", 4)
    assert scene.engine.adapters.has_changed
    scene.add(PROMPT, adapter="fr", max_tokens=1)
    scene.run()


def test_a_failed_load_is_refused_with_the_workers_error_and_frees_its_row():
    scene = bench(max_adapters=1)
    for _ in range(3):
        assert scene.load_adapter("fr", request=5) is None
        scene.run_adapter(fails=True)
        _, reply = scene.adapters.replies[-1]
        assert error_of(reply) == ("invalid_request", "lora_path")
    assert scene.load_adapter("fr") is None
    scene.run_adapter()
    assert [info.name for info in scene.engine.adapters.infos] == ["fr"]


def test_unloading_waits_for_running_and_waiting_requests():
    scene = bench("fr", max_slots=1, steps_in_flight=2)
    first, second = (scene.add(PROMPT, adapter="fr", max_tokens=5) for _ in range(2))
    scene.step()
    assert scene.unload_adapter("fr") is None
    assert error_of(scene.refusal(PROMPT, adapter="fr")) == ("model_not_found", "model")
    assert not scene.engine.adapters.infos
    while scene.step() is not None:
        is_open = scene.engine.num_open > 0
        scene.adapters.commands += scene.engine.adapters.drain_commands()
        assert not (is_open and scene.adapters.commands), "unloaded too early"
    scene.run_adapter()
    assert [scene.last_output(number).finish for number in (first, second)] == ["length"] * 2
    assert scene.engine.adapters.is_empty
    assert isinstance(scene.adapters.replies[-1][1], AdapterChanged)


def test_waiting_for_the_last_request_of_an_adapter_looks_at_no_other_request(monkeypatch):
    scene = bench("fr", max_slots=2)
    for name in ("fr", "", "", ""):
        scene.add(PROMPT, adapter=name, max_tokens=3)
    scene.step()
    assert scene.unload_adapter("fr") is None

    def refuse(self: OpenRequests) -> Iterator[Request]:
        raise AssertionError("this takes a time that grows with the number of requests")

    with monkeypatch.context() as patched:
        patched.setattr(OpenRequests, "__iter__", refuse)
        assert scene.engine.adapters.drain_commands() == []
    scene.run()
    scene.run_adapter()
    assert scene.engine.adapters.is_empty


def test_a_request_whose_grammar_fails_uses_its_adapter_no_more():
    scene = bench("fr")
    scene.add(PROMPT, adapter="fr", grammar=Regex(pattern="(a"), max_tokens=3)
    assert scene.unload_adapter("fr") is None
    assert scene.engine.adapters.drain_commands() == []
    scene.compile()
    assert len(scene.refusals) == 1
    scene.run_adapter()
    assert scene.engine.adapters.is_empty


def test_unloading_waits_for_a_request_whose_grammar_is_being_compiled():
    scene = bench("fr")
    number = scene.add(PROMPT, adapter="fr", grammar=Regex(pattern="a"), max_tokens=3)
    assert scene.unload_adapter("fr") is None
    scene.step()
    assert not scene.adapters.commands
    scene.compile()
    scene.run()
    assert scene.last_output(number).finish == "stop"
    scene.run_adapter()
    assert scene.engine.adapters.is_empty


def test_unloading_waits_for_the_step_of_an_aborted_request():
    scene = bench("fr")
    number = scene.add(PROMPT, adapter="fr", max_tokens=5)
    scene.plan()
    scene.abort(number)
    assert scene.unload_adapter("fr") is None
    assert not scene.adapters.commands, "the step in flight still uses it"
    scene.finish()
    scene.run_adapter()
    assert scene.engine.adapters.is_empty


def test_the_name_of_a_leaving_adapter_is_free_and_gets_another_row():
    scene = bench("fr", max_adapters=2)
    old = scene.add(PROMPT, adapter="fr", max_tokens=5)
    scene.step()
    assert scene.unload_adapter("fr") is None
    assert scene.load_adapter("fr") is None
    scene.run_adapter()
    new = scene.add(PROMPT, adapter="fr", max_tokens=5)
    scene.run()
    rows = {init.adapter for plan in scene.plans for init in plan.bind}
    assert rows == {0, 1}
    assert scene.tokens(old) == scene.tokens(new)
    scene.run_adapter()
    assert [info.name for info in scene.engine.adapters.infos] == ["fr"]


def test_a_reused_row_has_a_new_generation():
    scene = bench("fr", max_adapters=1)
    for generation in (2, 3):
        assert scene.unload_adapter("fr") is None
        scene.run_adapter()
        assert scene.load_adapter("fr") is None
        scene.run_adapter()
        assert scene.adapters.rows == {0: generation}


def test_the_table_is_bounded_and_a_leaving_adapter_keeps_its_row():
    scene = bench("fr", max_adapters=1)
    assert error_of(scene.load_adapter("de")) == ("invalid_request", "lora_name")
    scene.add(PROMPT, adapter="fr", max_tokens=5)
    scene.step()
    assert scene.unload_adapter("fr") is None
    assert error_of(scene.load_adapter("de")) == ("invalid_request", "lora_name")
    scene.run()
    scene.run_adapter()
    assert scene.load_adapter("de") is None


@pytest.mark.parametrize("name", ["", "a:b", "a b", "é", "-a", "x" * 129])
def test_a_bad_name_is_refused(name):
    assert error_of(bench().load_adapter(name, "path")) == ("invalid_request", "lora_name")


def test_what_exists_or_is_being_loaded_is_not_loaded_again():
    scene = bench("fr")
    assert error_of(scene.load_adapter("fr")) == ("invalid_request", "lora_name")
    assert error_of(scene.load_adapter(a_card().name)) == (
        "invalid_request",
        "lora_name",
    )
    assert scene.load_adapter("de") is None
    assert error_of(scene.load_adapter("de")) == ("invalid_request", "lora_name")
    assert error_of(scene.unload_adapter("de")) == ("model_not_found", "lora_name")


def test_an_engine_without_a_directory_of_adapters_loads_none():
    assert error_of(Bench().load_adapter("fr")) == ("invalid_request", "lora_path")


def test_a_draining_engine_loads_none():
    scene = bench()
    scene.engine.drain()
    assert error_of(scene.load_adapter("fr")) == ("draining", None)


def test_a_report_that_answers_no_command_is_an_error():
    with pytest.raises(RuntimeError, match="row 1, generation 9"):
        bench("fr").engine.on_adapter_report(AdapterReport(row=1, generation=9))


def test_statistics_count_requests_by_adapter():
    scene = bench("fr", "de", max_slots=1)
    for name in ("fr", "fr", "de", ""):
        scene.add(PROMPT, adapter=name, max_tokens=5)
    scene.step()
    stats = scene.engine.stats()
    assert (stats.adapters_running, stats.adapters_waiting) == ({"fr": 1}, {"fr": 1, "de": 1})
    assert (stats.num_adapter_requests, stats.max_adapters) == ({"fr": 2, "de": 1}, 2)


def test_a_group_of_workers_has_no_adapters():
    for options in ({"lora": ["a=/a"]}, {"lora_dir": "/adapters"}):
        with pytest.raises(ValueError, match="tensor_parallel cannot be combined with lora"):
            EngineConfig(worker=WorkerConfig(model="m", **options), tensor_parallel=2)
