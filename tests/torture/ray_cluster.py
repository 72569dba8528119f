"""Ends engines that Ray has placed, under load. Each stream must end as it would have alone.

    python -m tests.torture.ray_cluster [--runs 12] [--streams 32]

A Ray cluster of two nodes and a head runs on this machine, with an engine of a small random model
on each node. In each run, all requests are streamed at once, and at a random moment one node, the
actor of one engine, one engine, or the launcher (with all engines) is killed. Token ids, text,
finish reasons, logprobs and usage must be those of the answers computed alone. Each engine that
ended must leave no process behind, and is placed again: on a new node after the loss of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.processes import descendants_of, is_alive
from tests.support.ray_nodes import ClusterServer, RayNodes, ray_nodes
from tests.support.streams import run_all, varied_requests
from tests.support.tiny_checkpoint import FITTING, write_babbling_llama
from tests.support.waiting import eventually
from tests.torture.failover import COLUMNS, FailoverRow, differences, num_moved, stream_with_fault
from tests.torture.table import print_table

DTYPE = "float32"
# Ray ends the engines of a lost launcher a second or so later. Short streams may have ended then,
# so this way need not move any, unlike those that are called kills.
WAYS = ("kill node", "kill actor", "kill engine", "lose launcher")
LAUNCHER = "-m tools.cluster"
PROGRAMS = {"kill actor": "ray::EngineRunner", "kill engine": "-m engine_core"}
"""Way to end an engine -> a part of the command line of the process that is killed."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    return print_table(COLUMNS, _rows(options), slack=1.0)


def _rows(options: argparse.Namespace) -> Iterator[FailoverRow]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_babbling_llama(Path(folder), **FITTING)
        runs = -(-options.runs // len(options.ways))
        with ray_nodes([1, 1]) as (cluster, nodes):
            yield from ray_cluster_rows(
                cluster,
                nodes,
                model,
                options.ways,
                runs=runs,
                streams=options.streams,
                seed=options.seed,
            )


def ray_cluster_rows(
    cluster: RayNodes,
    nodes: list[Any],
    model: Path,
    ways: Sequence[str],
    *,
    runs: int,
    streams: int,
    seed: int,
) -> Iterator[FailoverRow]:
    """Yield a row for each way, after `runs` runs each.

    nodes   two nodes with one CPU each. Those that are killed are replaced in the list
    """
    dice = random.Random(seed)
    asked = varied_requests(streams, seed)
    options = ("--dtype", DTYPE, "--restart", "--restart-limit", "1000")
    with ClusterServer(cluster, model, *options, replicas=2) as server:
        assert server.hosts() == {cluster.ip(node) for node in nodes}, "the engines are not spread"
        if os.geteuid() == 0:  # others may not lower it
            found = {os.getpriority(os.PRIO_PROCESS, pid) for pid in _engines("127.0.0.")}
            assert found == {os.getpriority(os.PRIO_PROCESS, 0)}, "Ray makes the engines nice"
        alone = run_all(server.url, asked, at_once=1)
        for answer in alone:
            assert not answer.error, answer.error
        num_tokens = sum(answer.num_tokens for answer in alone)
        for way in ways:
            row = FailoverRow(DTYPE, way)
            for _ in range(runs):
                before = num_moved(server.url)
                pids = _engines("127.0.0.")
                node = nodes.pop(dice.randrange(len(nodes)))
                last = num_tokens // (20 if way == "lose launcher" else 4)
                after = dice.randrange(1, last)
                end = _killer(server, cluster, node, way)
                answers = stream_with_fault(server.url, asked, after, end)
                row.num_runs += 1
                row.num_streams += len(answers)
                row.num_moved += num_moved(server.url) - before
                row.wrong += differences(asked, alone, answers)
                nodes.append(cluster.add(1) if way == "kill node" else node)
                server.await_hosts({cluster.ip(each) for each in nodes})
                others = [] if way == "lose launcher" else _engines(cluster.ip(nodes[0]))
                assert eventually(partial(_have_ended, {*pids} - {*others})), "engines were left"
            yield row
        server.signal(signal.SIGTERM)
        assert server.end() == 0, server.output
        assert eventually(lambda: not _engines("127.0.0.")), "an engine outlived its server"


def _killer(server: ClusterServer, cluster: RayNodes, node: Any, way: str) -> Callable[[], object]:
    if way == "kill node":
        actors = _pids(PROGRAMS["kill actor"], cluster.ip(node))
        return lambda: cluster.kill(node, [*actors, *_engines(cluster.ip(node))])
    if way == "lose launcher":
        found = descendants_of(server.process.pid)
        (pid,) = (pid for pid, words in found if LAUNCHER in words)
    else:
        (pid,) = _pids(PROGRAMS[way], cluster.ip(node))
    return lambda: os.kill(pid, signal.SIGKILL)


def _have_ended(pids: Iterable[int]) -> bool:
    return not any(map(is_alive, pids))


def _engines(ip: str) -> list[int]:
    """Return the processes of engines whose address starts with `ip`."""
    return [pid for pid, words in descendants_of(os.getpid()) if f"tcp://{ip}" in words]


def _pids(program: str, ip: str) -> list[int]:
    """Return the processes of a node's engine with `program` in their command lines. Actors have
    no address in theirs, so the one that is an ancestor of the engine is returned."""
    engines = _engines(ip)
    return [
        pid
        for pid, words in descendants_of(os.getpid())
        if program in words and (pid in engines or {e for e, _ in descendants_of(pid)} & {*engines})
    ]


if __name__ == "__main__":
    sys.exit(main())
