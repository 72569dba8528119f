"""The fuzz targets that are ZeroMQ sockets, by name."""

from __future__ import annotations

from collections.abc import Callable

from tests.torture.fuzz.decisions import engine_clients, engine_worker, gateway
from tests.torture.fuzz.outcome import Outcome
from tests.torture.fuzz.strangers import cluster
from tests.torture.fuzz.workers import kv_reader, kv_server, worker_engine

Target = Callable[[int, int], Outcome]
"""Takes the number of messages (for `worker_engine` the number of workers) and a seed."""

TARGETS: dict[str, Target] = {
    "engine-clients": engine_clients,
    "engine-worker": engine_worker,
    "gateway": gateway,
    "cluster": cluster,
    "kv-server": kv_server,
    "kv-reader": kv_reader,
    "worker-engine": worker_engine,
}
