"""Decides which engines a command starts, and makes their configs.

    serve                       one engine
    serve --cluster-key FILE    one engine, which can pass K/V to other engines of its cluster
    serve --split               a prefill and a decode engine on this machine, with a temporary key
    serve --prefill --decode    none, because the engines run elsewhere
    engine                      one engine of a cluster, without a gateway

With --split, the decode engine has the default address of a server's engine, to which clients
connect.
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
from tools.libraries.catalogue import library_folder
from tools.models.catalogue import CATALOGUE
from tools.models.fetch import home
from tools.processes.run_lock import RUN_KEY

Engines = Mapping[str, EngineConfig]
"""Engine name -> config, in the order in which a drain stops them."""

_with = msgspec.structs.replace


def engines_of(serve: ServeConfig, engine: EngineConfig, directory: Path) -> Engines:
    """Return the engines that `tidegate serve` starts, by process name.

    engine      one engine as the options describe it
    directory   the run directory of the server
    """
    if serve.render_only or serve.decode:
        return {}
    if not serve.split:
        if not serve.cluster_key:
            return {"engine": engine}
        kv_address = serve.kv_address or f"ipc://{directory / 'kv.sock'}"
        return {"engine": in_cluster(engine, serve.cluster_key, kv_address)}
    key = str(directory / RUN_KEY)
    share = engine.worker.gpu_memory / 2  # both engines use the same device
    engine = _with_worker(engine, share_device=True, gpu_memory=share)
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
    """Return the gateway's config, with the addresses of its engines and the file of the cluster
    key.

    engine    one engine as the options describe it
    engines   the engines to start
    """
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
    """Return the config `engine`, changed for an engine that is part of a cluster.

    key          file with the cluster key
    kv_address   address where other engines fetch K/V from this one; unused with the role decode
    """
    key = os.path.abspath(key)
    exports = engine.role != "decode"
    engine = _with(engine, cluster_key=key)
    return _with_worker(
        engine, cluster_key=key, kv_export=exports, kv_address=kv_address if exports else ""
    )


def with_model(engine: EngineConfig, path: Path, draft: Path | None = None) -> EngineConfig:
    """Return the config `engine` with the paths of the model and of the draft model, the sampling
    parameters that the catalogue recommends for the model, and the directory in which workers cache
    measurements."""
    entry = CATALOGUE.get(engine.worker.model)
    measurements = str(home() / "measurements")
    draft_path = str(draft or "")
    return _with_worker(
        engine,
        model=str(path),
        draft_model=draft_path,
        measurements=measurements,
        libraries=str(library_folder(home())),
        recommended_sampling=entry.sampling if entry else SamplingDefaults(),
    )


def check_reachable(address: str, option: str) -> None:
    """Raise Failure if no other host can connect to `address`, the value of `option`."""
    if not sockets.is_connectable(address):
        raise Failure(
            f"{option} {address}: the host must be one that other machines can connect to",
            exit_code=2,
        )


def _halves(cores: int) -> tuple[int, int]:
    """Return the numbers of threads of the prefill engine and of the decode engine. The prefill
    engine gets one more if `cores` is odd."""
    return max(1, cores - cores // 2), max(1, cores // 2)


def _with_worker(engine: EngineConfig, **changes: object) -> EngineConfig:
    return _with(engine, worker=_with(engine.worker, **changes))
