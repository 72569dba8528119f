"""The launcher of --cluster: what it is started with, and what each engine gets."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.config.cluster import ClusterConfig
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.wire.cluster_key import read_cluster_key
from tools.cluster.command import model_on_nodes, prepare_files
from tools.cluster.placement_states import PlaceWish
from tools.cluster.resources import (
    ClusterNode,
    engine_arguments,
    even_share,
    free_in_words,
    resources_of,
)
from tools.commands import engine as engine_command
from tools.commands.serve import commands, plan
from tools.failure import Failure
from tools.flags import OneLineParser, add_flags, build, to_arguments
from tools.processes.start_checks import check_installation

SERVE: dict[str, Any] = {"model": ["./model.gguf"], "cluster": "head:6379", "port": 8765}


def nodes(*totals: dict[str, float]) -> list[ClusterNode]:
    return [ClusterNode(f"node{n}", f"10.0.0.{n}", total) for n, total in enumerate(totals)]


def config(**fields: Any) -> ClusterConfig:
    wiring = {"cluster": "auto", "model": "m", "cluster_key": "k", "engines_file": "e"}
    return ClusterConfig(**{**wiring, "arguments": [], **fields})


@pytest.mark.parametrize(
    ("cpus", "replicas", "share"),
    [([16, 16], 2, 16), ([16, 16], 3, 8), ([16, 4], 2, 8), ([16], 3, 5), ([1], 4, 1), ([], 1, 1)],
)
def test_engines_on_cpus_get_equal_shares_of_the_cluster(
    cpus: list[int], replicas: int, share: int
) -> None:
    assert even_share(cpus, replicas) == share
    needed = resources_of(config(replicas=replicas), nodes(*({"CPU": float(c)} for c in cpus)))
    assert needed == {"CPU": share}


@pytest.mark.parametrize(
    ("fields", "needed", "options"),
    [
        ({}, {"GPU": 1}, ["--device=cuda"]),
        ({"cpus_per_replica": 2}, {"GPU": 1, "CPU": 2}, ["--device=cuda"]),
        ({"workers_per_replica": 4}, {"GPU": 4}, ["--device=cuda"]),
        ({"device": "cpu"}, {"CPU": 8}, ["--device=cpu", "--threads=8"]),
        ({"device": "cpu", "threads": 3}, {"CPU": 3}, ["--device=cpu", "--threads=3"]),
        (
            {"device": "cpu", "threads": 3, "cpus_per_replica": 6},
            {"CPU": 6},
            ["--device=cpu", "--threads=3"],
        ),
        (
            {"device": "cpu", "threads": 3, "workers_per_replica": 2},
            {"CPU": 6},
            ["--device=cpu", "--threads=3"],
        ),
        (
            {"device": "cpu", "workers_per_replica": 2},
            {"CPU": 8},
            ["--device=cpu", "--threads=4"],
        ),
    ],
)
def test_all_engines_use_gpus_if_a_node_has_one(
    fields: dict[str, Any], needed: dict[str, float], options: list[str]
) -> None:
    found = nodes({"CPU": 8.0}, {"CPU": 4.0, "GPU": 8.0})
    assert resources_of(config(**fields), found) == needed
    assert engine_arguments(config(**fields), found) == ["m", *options]


def test_a_node_holds_as_many_engines_as_its_scarcest_resource_allows() -> None:
    (node,) = nodes({"CPU": 8.0, "GPU": 3.0})
    assert node.capacity({"CPU": 3.0}) == 2
    assert node.capacity({"CPU": 1.0, "GPU": 1.0}) == 3
    assert node.capacity({"TPU": 1.0}) == 0


def test_free_resources_are_those_that_an_engine_needs() -> None:
    found = nodes({"CPU": 8.0, "memory": 1e9}, {"CPU": 4.0})
    assert free_in_words({"CPU": 4.0, "GPU": 1.0}, {"CPU": 3.0}, found) == "CPU 3 of 12, GPU 0 of 0"


def test_the_options_of_engines_and_workers_are_passed_on() -> None:
    made = plan({**SERVE, "max_slots": 4, "drain_s": 7.0, "token_budget": 99, "threads": 2})
    assert made.cluster is not None
    arguments = made.cluster.arguments
    assert {"--max-slots=4", "--drain-s=7.0", "--token-budget=99"} <= set(arguments)
    assert (made.cluster.threads, made.cluster.workers_per_replica) == (2, 1)
    assert not [each for each in arguments if each.startswith(("--threads", "--device"))]


def test_a_group_of_workers_gets_as_many_gpus_on_one_node() -> None:
    made = plan({**SERVE, "tensor_parallel": 2})
    assert made.cluster is not None
    found = nodes({"GPU": 2.0}, {"GPU": 1.0})
    needed = resources_of(made.cluster, found)
    assert needed == {"GPU": 2}
    assert [node.capacity(needed) for node in found] == [1, 0]
    assert "--tensor-parallel=2" in made.cluster.arguments


def test_the_options_that_are_passed_on_are_options_of_tidegate_engine() -> None:
    made = plan({**SERVE, "max_slots": 4, "prefix_cache": False})
    assert made.cluster is not None
    parser = OneLineParser()
    engine_command.add_arguments(parser)
    words = [*engine_arguments(made.cluster, nodes({"CPU": 8.0})), "--address=tcp://h:1"]
    options = vars(parser.parse_args([*words, f"--cluster-key={made.cluster.cluster_key}"]))
    solo, engine, _ = engine_command.plan(options)
    assert (engine.worker.max_slots, engine.worker.threads, engine.prefix_cache) == (4, 8, False)
    assert (engine.role, engine.worker.kv_export) == ("both", False)
    assert solo.start_timeout_s == 600.0


def test_options_of_a_config_make_an_equal_config() -> None:
    given = WorkerConfig(model="", max_slots=7, kv_disk="-odd name", share_device=True)
    parser = argparse.ArgumentParser()
    add_flags(parser, WorkerConfig, title="the worker")
    words = to_arguments(given)
    assert build(WorkerConfig, vars(parser.parse_args(words)), model="") == given
    assert to_arguments(WorkerConfig(model="")) == []
    plain = WorkerConfig(model="")
    assert to_arguments(EngineConfig(worker=plain, prefix_cache=False)) == ["--no-prefix-cache"]
    assert to_arguments(given, without=["kv_disk", "share_device"]) == ["--max-slots=7"]


def test_the_gateway_reads_the_list_of_engines_that_the_launcher_writes() -> None:
    made = plan({**SERVE, "replicas": 3})
    assert made.cluster is not None
    assert made.gateway.engines_file == made.cluster.engines_file
    assert made.gateway.cluster_key == made.cluster.cluster_key
    assert (made.engines, made.gateway.engines, made.cluster.replicas) == ({}, [], 3)


def test_the_launcher_is_drained_after_the_gateway() -> None:
    made = plan(SERVE)
    assert [command.name for command in commands(made, lock=0)] == ["gateway", "cluster"]
    given = commands(made, lock=0)[1].arguments[-1]
    assert msgspec.json.decode(given, type=ClusterConfig) == made.cluster


def test_a_key_is_made_for_each_run_unless_one_is_given(tmp_path: Path) -> None:
    gateway = msgspec.structs.replace(
        plan(SERVE).gateway,
        engines_file=str(tmp_path / "engines"),
        cluster_key=str(tmp_path / "key"),
    )
    made = set()
    for _ in range(2):
        prepare_files(gateway, plan(SERVE).serve)
        assert read_cluster_key(gateway.cluster_key) is not None
        made.add(Path(gateway.cluster_key).read_bytes())
    assert len(made) == 2
    assert stat.S_IMODE(os.stat(gateway.cluster_key).st_mode) == 0o600
    assert Path(gateway.engines_file).read_text() == ""
    prepare_files(gateway, plan({**SERVE, "cluster_key": gateway.cluster_key}).serve)
    assert Path(gateway.cluster_key).read_bytes() in made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda:1"}, "--device cuda:1: Ray chooses the GPUs"),
        ({"role": "decode"}, "--cluster and --role cannot be combined"),
        ({"journal": "/j"}, "--cluster and --journal cannot be combined"),
        ({"split": True}, "--split and --cluster cannot be combined"),
        ({"engines": ["ipc://x"]}, "--engines and --cluster cannot be combined"),
        ({"kv_address": "tcp://h:1"}, "--cluster and --kv-address cannot be combined"),
        ({"cluster": None, "cpus_per_replica": 2}, "--cpus-per-replica needs --cluster"),
        ({"cluster": None, "cluster_env": ["HF_TOKEN"]}, "--cluster-env needs --cluster"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(Failure, match=words):
        plan({**SERVE, **options})


def test_a_model_in_a_file_has_an_absolute_path_on_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    (tmp_path / "qwen3-0.6b").mkdir()
    assert model_on_nodes("model.gguf") == str(tmp_path / "model.gguf")
    assert model_on_nodes("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert model_on_nodes("/models/only-there") == "/models/only-there"


def test_a_wish_is_spelled_as_labels_of_nodes() -> None:
    attempt = pytest.importorskip("tools.cluster.attempt", reason="ray is not installed")
    assert attempt.selector(PlaceWish("abc")) == {"ray.io/node-id": "in(abc)"}
    assert attempt.selector(PlaceWish(avoided=frozenset("cb"))) == {"ray.io/node-id": "!in(b,c)"}
    assert attempt.selector(PlaceWish()) == {}


@pytest.mark.parametrize("address", ["head", "head:port", "ray://head", ""])
def test_the_address_of_a_cluster_is_a_host_and_a_port(address: str) -> None:
    connection = pytest.importorskip("tools.cluster.connection", reason="ray is not installed")
    with pytest.raises(Failure, match=r"must be .* HOST:PORT"):
        connection.check_address(address)


def test_ray_is_needed_for_a_cluster_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else name)
    check_installation(["gunicorn"])
    with pytest.raises(Failure, match=r"ray is not installed; try: .*\[cluster\]"):
        check_installation(["ray"])
