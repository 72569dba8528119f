"""The config of the launcher, which places the engines of `tidegate serve --cluster` with Ray."""

from __future__ import annotations

from typing import Annotated, Literal

from protocol.config.base import Config, LogFormat, SharedKey, about


class ClusterConfig(Config, frozen=True, kw_only=True):
    """The process that places engines on the nodes of a Ray cluster, and watches them."""

    cluster: Annotated[
        str, about('address of the Ray cluster, HOST:PORT; "auto": the one of this host')
    ]
    model: Annotated[str, about("MODEL as each node finds it: a name, or an absolute path")]
    cluster_key: SharedKey
    engines_file: Annotated[str, about("file to which the addresses of ready engines are written")]
    arguments: Annotated[list[str], about("options of `tidegate engine`, the same for all engines")]
    replicas: Annotated[int, about("number of engines", ge=1)] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        about("auto: a GPU if a node of the cluster has one, else the CPU"),
    ] = "auto"
    workers_per_replica: Annotated[
        int, about("workers of each engine, each with a GPU of its own or a part of the CPUs", ge=1)
    ] = 1
    cpus_per_replica: Annotated[
        int, about("CPUs that Ray reserves for each engine; 0: automatic", ge=0)
    ] = 0
    threads: Annotated[int, about("threads of each worker on a CPU; 0: one per CPU", ge=0)] = 0
    environment: Annotated[
        list[str], about("names of the launcher's variables that the engines get")
    ] = []
    start_timeout_s: Annotated[float, about("limit of the wait for a place, and of a start")] = 600
    drain_s: Annotated[float, about("seconds that open requests may continue in a drain")] = 30
    restart_limit: Annotated[
        int, about("starts of an engine after failures, within five minutes", ge=1)
    ] = 5
    log_format: LogFormat = "text"
