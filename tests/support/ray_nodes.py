"""A Ray cluster of several nodes on this machine, and a server whose engines it places."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import requests

from tests.support.ports import free_port
from tests.support.processes import ROOT, Program
from tests.support.server import POISON, START_TIMEOUT_S
from tests.support.waiting import eventually

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT),
}
OBJECT_STORE_BYTES = 100 << 20
"""Ray's smallest object store is a little less. We use none of it."""


class RayNodes:
    """A head node without CPUs, and nodes that `add` starts. Each has an IP address of its own,
    127.0.0.2 and the following ones: 127.0.0.1 would be replaced by the machine's outward address.

    address   of the cluster, for --cluster
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._count = 0
        self.add(0)
        self.address: str = cluster.address

    def add(self, cpus: int) -> Any:
        """Start a node with `cpus` CPUs."""
        self._count += 1
        return self._cluster.add_node(
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address=f"127.0.0.{self._count + 1}",
        )

    def ip(self, node: Any) -> str:
        return str(node.node_ip_address)

    def kill(self, node: Any, engines: Iterable[int] = ()) -> None:
        """Kill all processes of a node at once, as the loss of a machine does. Without the
        processes in `engines`, its engines end only when Ray's processes have noticed."""
        raylets = [each.process.pid for each in node.all_processes["raylet"]]
        for pid in [*raylets, *engines]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)


@contextmanager
def ray_nodes(cpus: Sequence[int]) -> Iterator[tuple[RayNodes, list[Any]]]:
    """Start a node for each number of CPUs, besides the head node."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        nodes = RayNodes(cluster)
        yield nodes, [nodes.add(each) for each in cpus]
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class ClusterServer(Program):
    """A `tidegate serve --cluster` process, ready inside its `with` block with all replicas.

    url   HTTP address
    """

    def __init__(self, nodes: RayNodes, model: Path, *options: str, replicas: int) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._replicas = replicas
        where = ["--port", str(port), "--cluster", nodes.address, "--replicas", str(replicas)]
        super().__init__(["-P", "-m", "tools", "serve", str(model), *where, *POISON, *options])

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.line_with("Tidegate serves", timeout_s=START_TIMEOUT_S)
            self.await_replicas(self._replicas)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def states(self) -> list[dict[str, Any]]:
        """Return the replicas, as the gateway reports them."""
        found = requests.get(self.url + "/readyz", timeout=10).json().get("replicas", [])
        return list(found)

    def hosts(self) -> set[str]:
        """Return the IP addresses of the replicas that are ready."""
        ready = [state["address"] for state in self.states() if state["ready"]]
        return {address.removeprefix("tcp://").rpartition(":")[0] for address in ready}

    def await_replicas(self, count: int) -> None:
        def are_ready() -> bool:
            return [state["ready"] for state in self.states()] == [True] * count

        assert eventually(are_ready, within_s=START_TIMEOUT_S), f"{self.states()}\n{self.output}"

    def await_hosts(self, hosts: set[str]) -> None:
        """Wait until there is a ready replica at each of these IP addresses, and no other one."""
        self.await_replicas(len(hosts))
        assert eventually(lambda: self.hosts() == hosts, within_s=START_TIMEOUT_S), self.output
