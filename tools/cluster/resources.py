"""The resources of a Ray cluster: what its nodes have, and what each engine needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protocol.config.cluster import ClusterConfig

CPU, GPU = "CPU", "GPU"
"""The names of Ray's resources."""

Resources = Mapping[str, float]
"""Name of a resource -> amount."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A living node of the cluster."""

    id: str
    #: The address that other nodes use, which may be an IPv6 address.
    ip: str
    #: All that the node has, in use or not.
    total: Resources

    def capacity(self, need: Resources) -> int:
        """Return how many engines that need `need` fit on this node if nothing else uses it."""
        return int(min(self.total.get(name, 0.0) // amount for name, amount in need.items()))


def use_gpus(config: ClusterConfig, nodes: Iterable[ClusterNode]) -> bool:
    """Return whether the engines compute on GPUs. All engines use the same kind of device, so that
    each can continue the answers of another one with the same numbers."""
    if config.device == "auto":
        return any(node.total.get(GPU, 0.0) >= 1.0 for node in nodes)
    return config.device == "cuda"


def resources_of(config: ClusterConfig, nodes: Sequence[ClusterNode]) -> dict[str, float]:
    """Return the resources that Ray reserves for each engine."""
    if use_gpus(config, nodes):
        need = {GPU: float(config.workers_per_replica)}
        return need | {CPU: float(config.cpus_per_replica)} if config.cpus_per_replica else need
    cpus = [int(node.total.get(CPU, 0.0)) for node in nodes]
    wanted = config.cpus_per_replica or config.threads * config.workers_per_replica
    return {CPU: float(wanted or even_share(cpus, config.replicas))}


def even_share(cpus: Sequence[int], replicas: int) -> int:
    """Return the largest number of CPUs that each of `replicas` engines can have, at least 1.

    cpus   CPUs of each node; an engine uses the CPUs of one node only
    """
    fitting = (
        share
        for share in range(max(cpus, default=0), 0, -1)
        if sum(count // share for count in cpus) >= replicas
    )
    return next(fitting, 1)


def engine_arguments(config: ClusterConfig, nodes: Sequence[ClusterNode]) -> list[str]:
    """Return the arguments of `tidegate engine` that are the same for all engines."""
    arguments = [config.model, *config.arguments]
    if use_gpus(config, nodes):
        return [*arguments, "--device=cuda"]
    share = int(resources_of(config, nodes)[CPU]) // config.workers_per_replica
    return [*arguments, "--device=cpu", f"--threads={config.threads or max(share, 1)}"]


def in_words(resources: Resources) -> str:
    """Return resources as text: "CPU 4, GPU 1"."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items()))


def free_in_words(need: Resources, free: Resources, nodes: Iterable[ClusterNode]) -> str:
    """Return how much of the resources in `need` is free in the cluster, as text: "CPU 1 of 8"."""
    total = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in need}
    return ", ".join(f"{name} {free.get(name, 0.0):g} of {total[name]:g}" for name in sorted(need))
