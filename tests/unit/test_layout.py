"""The processes that a command starts, their addresses and options. The tests start none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.config.engine import EngineConfig
from protocol.wire.cluster_key import ClusterKey
from protocol.wire.sockets import check_address, engine_address, run_directory
from tools.__main__ import build_parser
from tools.commands import engine as solo
from tools.commands.serve import commands, plan
from tools.failure import Failure
from tools.processes.run_lock import RUN_KEY
from tools.processes.serve_plan import ServePlan
from tools.processes.topology import num_gpus

FAR = ("--prefill", "tcp://a:1", "--prefill", "tcp://b:1", "--decode", "tcp://c:1")
KEYED = ("--cluster-key", "some.key")


def serve(*words: str) -> ServePlan:
    return plan(vars(build_parser().parse_args(["serve", *words])))


def engine(*words: str) -> EngineConfig:
    options: dict[str, Any] = vars(build_parser().parse_args(["engine", *words]))
    return solo.plan(options)[1]


def names(made: ServePlan) -> list[str]:
    return [command.name for command in commands(made, lock=0)]


def test_by_default_one_engine_starts_without_a_cluster() -> None:
    made = serve()
    (only,) = made.engines.values()
    assert names(made) == ["gateway", "engine"]
    assert (made.gateway.engine, made.gateway.prefill) == (engine_address(), [])
    assert (only.cluster_key, only.worker.kv_export) == ("", False)


def test_replicas_share_the_cores_and_have_addresses_of_their_own() -> None:
    made = serve("--replicas", "3", "--port", "8001", "--journal", "/tmp/journal")
    assert names(made) == ["gateway", "engine 1", "engine 2", "engine 3"]
    engines = list(made.engines.values())
    assert made.gateway.engines == [engine.address for engine in engines]
    assert engines[0].address == engine_address(8001)
    for field in ("address", "journal"):
        assert len({getattr(engine, field) for engine in engines}) == 3
    assert len({engine.worker.address for engine in engines}) == 3
    cores = len(os.sched_getaffinity(0))
    assert sum(engine.worker.threads for engine in engines) == max(3, cores)
    for engine in engines:
        check_address(engine.address, None)


def test_each_replica_has_a_gpu_of_its_own_if_there_are_enough() -> None:
    made = replace(serve("--replicas", "2"), num_gpus=2)
    workers = [engine.worker for engine in made.engines.values()]
    assert [worker.device for worker in workers] == ["cuda:0", "cuda:1"]
    assert not any(worker.share_device for worker in workers)
    made = replace(made, num_gpus=1)
    workers = [engine.worker for engine in made.engines.values()]
    assert [(w.share_device, w.gpu_memory) for w in workers] == [(True, 0.45)] * 2


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("1,3", 2), ("GPU-a,GPU-b", 2)]
)
def test_the_visible_gpus_are_counted(visible: str, count: int) -> None:
    assert num_gpus(visible) == count


def test_engines_elsewhere_are_named_by_options_or_a_file(tmp_path: Path) -> None:
    made = serve("--engines", "tcp://a:1, tcp://b:1", "--engines", "tcp://c:1", *KEYED)
    assert names(made) == ["gateway"]
    assert made.gateway.engines == ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
    made = serve("--engines-file", str(tmp_path / "engines"), *KEYED)
    assert (names(made), made.gateway.engines) == (["gateway"], [])
    assert made.gateway.engines_file == str(tmp_path / "engines")


@pytest.mark.parametrize(
    "words",
    [
        ("--replicas", "2", "--split"),
        ("--engines", "tcp://a:1", "--replicas", "2"),
        (*FAR, "--engines", "tcp://a:1"),
    ],
)
def test_only_one_way_to_have_several_engines_can_be_chosen(words: tuple[str, ...]) -> None:
    with pytest.raises(Failure, match="cannot be combined"):
        serve(*words, *KEYED)


def test_split_starts_a_pair_that_a_drain_stops_from_the_client_backwards() -> None:
    made = serve("--split", "--port", "8001", "--max-slots", "2")
    assert names(made) == ["gateway", "decode engine", "prefill engine"]
    decode, prefill = made.engines.values()
    assert (decode.role, prefill.role) == ("decode", "prefill")
    assert made.gateway.prefill == [prefill.address]
    assert made.gateway.decode == [decode.address] == [engine_address(8001)]
    assert prefill.worker.max_slots == decode.worker.max_slots == 2
    assert prefill.worker.share_device
    assert decode.worker.share_device
    assert prefill.worker.gpu_memory == decode.worker.gpu_memory == 0.45
    key = str(run_directory(8001) / RUN_KEY)
    for config in (decode, prefill, decode.worker, prefill.worker):
        assert config.cluster_key == key
    assert (decode.worker.kv_export, prefill.worker.kv_export) == (False, True)
    assert made.gateway.cluster_key == ""  # all it connects to is in a private directory
    addresses = [decode.address, decode.worker.address, prefill.address]
    addresses += [prefill.worker.address, prefill.worker.kv_address]
    assert len(set(addresses)) == 5
    for address in addresses:
        assert check_address(address) is not None  # ipc, and short enough


@pytest.mark.parametrize("way", [["--split"], ["--replicas", "2"]])
def test_engines_of_one_server_do_not_publish_on_one_address(way: list[str]) -> None:
    events = ["--kv-events", "tcp://127.0.0.1:5557", "--kv-events-namespace", ""]
    with pytest.raises(Failure, match=r"--kv-events cannot be used with --split or --replicas"):
        serve(*way, *events)
    (alone,) = serve(*events).engines.values()
    assert (alone.kv_events, alone.kv_events_namespace) == (events[1], [""])


@pytest.mark.parametrize(("cores", "threads"), [(1, (1, 1)), (2, (1, 1)), (5, (3, 2)), (8, (4, 4))])
def test_split_divides_the_cores_between_its_workers(
    cores: int, threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    decode, prefill = serve("--split").engines.values()
    assert (prefill.worker.threads, decode.worker.threads) == threads
    decode, prefill = serve("--split", "--threads", "7").engines.values()
    assert (prefill.worker.threads, decode.worker.threads) == (7, 7)


def test_a_gateway_before_engines_elsewhere_starts_none() -> None:
    made = serve(*FAR, *KEYED, "--kv-on-failure", "error", "--split-min-tokens", "9")
    assert names(made) == ["gateway"]
    gateway = made.gateway
    assert (gateway.prefill, gateway.decode) == (["tcp://a:1", "tcp://b:1"], ["tcp://c:1"])
    assert gateway.cluster_key == str(Path("some.key").absolute())
    assert (gateway.kv_on_failure, gateway.split_min_tokens) == ("error", 9)
    assert gateway.served_name == []  # the engines know what they serve
    assert serve("qwen3-0.6b", *FAR, *KEYED).gateway.served_name in ([], ["qwen3-0.6b"])


def test_with_a_key_the_one_engine_takes_part_in_a_cluster() -> None:
    (only,) = serve(*KEYED).engines.values()
    assert (only.role, only.worker.kv_export) == ("both", True)
    assert only.worker.kv_address == f"ipc://{run_directory(8000)}/kv.sock"
    (only,) = serve(*KEYED, "--kv-address", "tcp://me:5601").engines.values()
    assert only.worker.kv_address == "tcp://me:5601"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--prefill", "tcp://a:1"), "--prefill and --decode"),
        (("--split", *FAR), "cannot be combined"),
        (("--split", "--render-only"), "cannot be combined"),
        (("--split", *KEYED), "--split makes its own key"),
        (("--kv-address", "tcp://a:1"), "needs --cluster-key"),
        ((*KEYED, "--kv-address", "tcp://0.0.0.0:1"), "the host must be one"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(Failure, match=why) as refused:
        serve(*words)
    assert refused.value.exit_code == 2


def test_a_single_engine_uses_its_configured_addresses() -> None:
    made = engine("--address", "tcp://0.0.0.0:5600", "--kv-address", "tcp://me:5601", *KEYED)
    key = str(Path("some.key").absolute())
    assert (made.address, made.cluster_key, made.worker.cluster_key) == (
        "tcp://0.0.0.0:5600",
        key,
        key,
    )
    assert check_address(made.address, ClusterKey(b"k" * 32)) is None
    assert (made.worker.kv_export, made.worker.kv_address) == (True, "tcp://me:5601")
    assert made.worker.address.startswith("ipc://")
    decode = engine("--role", "decode", *KEYED)
    assert (decode.worker.kv_export, decode.worker.kv_address) == (False, "")
    assert made.worker.address != decode.worker.address
    assert decode.worker.cluster_key == key
    alone = engine(*KEYED)  # a replica, whose K/V nobody fetches
    assert (alone.role, alone.worker.kv_export, alone.worker.kv_address) == ("both", False, "")
    assert (alone.cluster_key, alone.worker.cluster_key, alone.transfers_kv) == (key, "", False)


def test_replicas_with_a_key_transfer_no_kv() -> None:
    for replica in serve("--replicas", "2", *KEYED).engines.values():
        assert replica.cluster_key == str(Path("some.key").absolute())
        assert (replica.transfers_kv, replica.worker.cluster_key) == (False, "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "--cluster-key is required"),
        (("--role", "prefill", *KEYED), "needs --kv-address"),
        (("--kv-address", "tcp://*:1", *KEYED), "the host must be one"),
    ],
)
def test_an_engine_without_the_options_of_its_role_is_refused(
    words: tuple[str, ...], why: str
) -> None:
    with pytest.raises(Failure, match=why) as refused:
        engine(*words)
    assert refused.value.exit_code == 2
