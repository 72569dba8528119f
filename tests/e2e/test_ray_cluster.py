"""Engines that Ray places: the short form of tests/torture/ray_cluster.py, and how starts fail."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.ports import free_port
from tests.support.processes import Program
from tests.support.ray_nodes import ClusterServer, RayNodes, ray_nodes
from tests.support.tiny_checkpoint import FITTING, write_babbling_llama
from tests.torture.ray_cluster import ray_cluster_rows

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (tidegate[cluster])"),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[tuple[RayNodes, list[Any]]]:
    """Return a Ray cluster with two nodes of one CPU each, besides the head node."""
    with ray_nodes([1, 1]) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_babbling_llama(tmp_path_factory.mktemp("model"), **FITTING)


def test_a_cluster_without_room_for_any_engine_is_reported(
    ray: tuple[RayNodes, list[Any]], model: Path
) -> None:
    options = ("--cpus-per-replica", "3", "--start-timeout-s", "1")
    program = ClusterServer(ray[0], model, *options, replicas=1)
    assert program.end() == ExitCode.NOT_READY
    wanted = "it needs CPU 3 on one node; free: CPU 2 of 2, on 3 nodes"
    assert wanted in program.err[-1], program.output


def test_a_model_that_a_node_cannot_load_ends_the_start(
    ray: tuple[RayNodes, list[Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    program = ClusterServer(ray[0], tmp_path, replicas=2)
    assert program.end() == ExitCode.BAD_MODEL
    assert f"exited with code {ExitCode.BAD_MODEL:d}" in program.err[-1], program.output


def test_streams_survive_the_loss_of_a_node_and_of_an_actor(
    ray: tuple[RayNodes, list[Any]], model: Path
) -> None:
    ways = ["kill node", "kill actor"]
    for row in ray_cluster_rows(*ray, model, ways, runs=1, streams=16, seed=1):
        assert row.num_runs == 1
        assert row.complaints(1.0) == []


def test_a_cluster_that_does_not_answer_is_reported() -> None:
    address, port = f"127.0.0.1:{free_port()}", str(free_port())
    serve = ["-P", "-m", "tools", "serve", "some/model", "--port", port, "--cluster", address]
    with Program(serve) as program:
        assert program.end() == ExitCode.ENGINE_LOST
        assert f"--cluster {address}: no Ray cluster answers" in program.err[-1]
