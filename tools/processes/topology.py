"""Which engines a command starts, under which names and addresses. Starts nothing itself.

    serve                       one engine
    serve --cluster-key FILE    one engine, which can hand K/V to others of its cluster
    serve --split               two on this machine: prefill and decode, with a key for this run
    serve --prefill --decode    none: they run elsewhere
    engine                      one of a cluster, without a gateway

The engine that answers keeps the address where every client looks for a server's engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from protocol import sockets
from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig
from protocol.config.serve import ServeConfig
from protocol.model_card import SamplingDefaults
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE
from tools.models.fetch import home
from tools.processes.run_lock import RUN_KEY

Engines = Mapping[str, EngineConfig]
"""name -> config, in the order in which a drain stops them"""

_with = msgspec.structs.replace


def engines_of(serve: ServeConfig, engine: EngineConfig, directory: Path) -> Engines:
    """`engine` as the options describe one; `directory` is the server's own."""
    if serve.render_only or serve.decode:
        return {}
    if not serve.split:
        if not serve.cluster_key:
            return {"engine": engine}
        kv_address = serve.kv_address or f"ipc://{directory / 'kv.sock'}"
        return {"engine": in_cluster(engine, serve.cluster_key, kv_address)}
    key = str(directory / RUN_KEY)
    engine = _with_worker(engine, share_device=True)  # both halves compute on the one there is
    for_p, for_d = _halves(len(os.sched_getaffinity(0)))
    decode = in_cluster(_with(engine, role="decode"), key, "")
    prefill = _with(engine, role="prefill", address=f"ipc://{directory / 'prefill.sock'}")
    prefill = in_cluster(prefill, key, f"ipc://{directory / 'kv.sock'}")
    return {
        "decode engine": _with_worker(decode, threads=engine.worker.threads or for_d),
        "prefill engine": _with_worker(
            prefill,
            threads=engine.worker.threads or for_p,
            address=f"ipc://{directory / 'prefill-worker.sock'}",
        ),
    }


def wired(
    gateway: GatewayConfig, serve: ServeConfig, engine: EngineConfig, engines: Engines
) -> GatewayConfig:
    """The gateway before these engines, or before those that the options name."""
    prefill, decode, key = serve.prefill, serve.decode, serve.cluster_key
    if serve.split:
        decode, prefill = ([config.address] for config in engines.values())
    return _with(
        gateway,
        engine=engine.address,
        prefill=prefill,
        decode=decode,
        cluster_key=os.path.abspath(key) if key else "",
        kv_on_failure=engine.kv_on_failure,
    )


def in_cluster(engine: EngineConfig, key: str, kv_address: str) -> EngineConfig:
    """`kv_address`: where other engines fetch from it; "" and role decode: nowhere."""
    key = os.path.abspath(key)
    exports = engine.role != "decode"
    engine = _with(engine, cluster_key=key)
    return _with_worker(
        engine, cluster_key=key, kv_export=exports, kv_address=kv_address if exports else ""
    )


def with_model(engine: EngineConfig, path: Path, draft: Path | None = None) -> EngineConfig:
    """Return `engine` with its model, still as the user named it, replaced by the model's path."""
    entry = CATALOGUE.get(engine.worker.model)
    measurements = str(home() / "measurements")
    draft_path = str(draft or "")
    return _with_worker(
        engine,
        model=str(path),
        draft_model=draft_path,
        measurements=measurements,
        recommended_sampling=entry.sampling if entry else SamplingDefaults(),
    )


def check_reachable(address: str, option: str) -> None:
    """Raises Failure where other hosts are to be told an address that names none."""
    if not sockets.names_a_host(address):
        raise Failure(
            f"{option} {address} names no host: others are told to come there", exit_code=2
        )


def _halves(cores: int) -> tuple[int, int]:
    """Threads for P and D: computing prompts takes what is odd."""
    return max(1, cores - cores // 2), max(1, cores // 2)


def _with_worker(engine: EngineConfig, **changes: object) -> EngineConfig:
    return _with(engine, worker=_with(engine.worker, **changes))
