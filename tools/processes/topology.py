"""Decides which engines a command starts, and makes their configs.

    serve                       one engine
    serve --cluster-key FILE    one engine, which can pass K/V to other engines of its cluster
    serve --split               a prefill and a decode engine on this machine, with a temporary key
    serve --replicas R          R engines, which share the cores or have a GPU each
    serve --prefill --decode    none, because the engines run elsewhere
    serve --engines             none, likewise
    engine                      one engine of a cluster, without a gateway

With --split, the decode engine has the default address of a server's engine, to which clients
connect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec

from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig
from protocol.config.serve import ServeConfig
from protocol.config.worker import Device
from protocol.wire import sockets
from tools.failure import Failure
from tools.libraries.catalogue import library_folder
from tools.models.fetch import home, recommended_sampling
from tools.processes.run_lock import RUN_KEY

Engines = Mapping[str, EngineConfig]
"""Engine name -> config, in the order in which a drain stops them."""

_with = msgspec.structs.replace


def engines_of(
    serve: ServeConfig, engine: EngineConfig, directory: Path, num_gpus: int = 0
) -> Engines:
    """Return the engines that `tidegate serve` starts, by process name.

    engine      one engine as the options describe it
    directory   the run directory of the server
    num_gpus    number of GPUs, of which each replica gets one

    Raises Failure if the options exclude each other.
    """
    if serve.render_only or serve.decode or serve.has_engines_elsewhere:
        return {}
    if engine.kv_events and (serve.split or serve.replicas > 1):
        raise Failure(
            "--kv-events cannot be used with --split or --replicas: all engines would publish on "
            "one address. Start them with `tidegate engine`, with an address each",
            exit_code=2,
        )
    if serve.replicas > 1:
        return _replicas(serve, engine, directory, num_gpus)
    if not serve.split:
        if not serve.cluster_key:
            if engine.workers_elsewhere:
                raise Failure("--workers-elsewhere needs --cluster-key", exit_code=2)
            return {"engine": engine}
        kv_address = serve.kv_address or f"ipc://{directory / 'kv.sock'}"
        return {"engine": in_cluster(engine, serve.cluster_key, kv_address)}
    key = str(directory / RUN_KEY)
    share = engine.worker.gpu_memory / 2  # both engines use the same device
    engine = _with_worker(engine, share_device=True, gpu_memory=share)
    for_p, for_d = _parts(len(os.sched_getaffinity(0)), 2)
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


def _replicas(serve: ServeConfig, engine: EngineConfig, directory: Path, num_gpus: int) -> Engines:
    """Return the engines of --replicas. The first one has the default address of a server's engine,
    to which programs connect that use the ZeroMQ client library. Without a GPU for each, they share
    one."""
    if engine.is_group:
        raise Failure(
            "--replicas and --tensor-parallel cannot be combined: start each replica with "
            "`tidegate engine`, and serve them with --engines",
            exit_code=2,
        )
    found: dict[str, EngineConfig] = {}
    if num_gpus < serve.replicas:  # no effect on a CPU
        share = engine.worker.gpu_memory / serve.replicas
        engine = _with_worker(engine, share_device=True, gpu_memory=share)
    shares = _parts(len(os.sched_getaffinity(0)), serve.replicas)
    for number, threads in enumerate(shares, start=1):
        address = engine.address if number == 1 else f"ipc://{directory / f'engine-{number}.sock'}"
        each = _with_worker(
            _with(engine, address=address),
            address=f"ipc://{directory / f'worker-{number}.sock'}",
            threads=engine.worker.threads or threads,
            device=_device_of(engine.worker.device, number - 1, num_gpus),
        )
        if engine.journal:
            each = _with(each, journal=os.path.join(engine.journal, f"engine-{number}"))
        if serve.cluster_key:  # the key is only for clients: replicas transfer no K/V
            each = in_cluster(each, serve.cluster_key, "")
        found[f"engine {number}"] = each
    return found


def _device_of(device: Device, number: int, num_gpus: int) -> Device:
    """Return the device of replica `number`, from 0: a GPU of its own if there are enough, or else
    the device of all."""
    if device in ("auto", "cuda") and num_gpus and number < num_gpus:
        return cast(Device, f"cuda:{number}")
    return device


def num_gpus(visible: str | None) -> int:
    """Return the number of NVIDIA GPUs that this process may use. Only torch could count them
    surely, which takes seconds. Linux lists them without it.

    visible   the variable CUDA_VISIBLE_DEVICES; None if it is not set
    """
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


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
    replicas = [config.address for config in engines.values()] if serve.replicas > 1 else []
    return _with(
        gateway,
        engine=engine.address,
        prefill=prefill,
        decode=decode,
        engines=replicas or serve.engines,
        engines_file=serve.engines_file,
        cluster_key=os.path.abspath(key) if key else "",
        kv_on_failure=engine.kv_on_failure,
    )


def in_cluster(engine: EngineConfig, key: str, kv_address: str) -> EngineConfig:
    """Return the config `engine`, changed for an engine that is part of a cluster.

    key          file with the cluster key
    kv_address   address where other engines fetch K/V from this one; unused with the role decode
    """
    key = os.path.abspath(key)
    if engine.is_group:  # the key is for its clients and its workers
        if kv_address.startswith("tcp://"):
            raise Failure(
                "--kv-address and --tensor-parallel cannot be combined: a group of workers "
                "exchanges no K/V with other engines",
                exit_code=2,
            )
        return _with(engine, cluster_key=key)
    exports = engine.role != "decode" and bool(kv_address)
    engine = _with(engine, cluster_key=key)
    return _with_worker(engine, kv_export=exports, kv_address=kv_address if exports else "")


def with_model(engine: EngineConfig, path: Path, draft: Path | None = None) -> EngineConfig:
    """Return the config `engine` with the paths of the model and of the draft model, the sampling
    parameters that the catalogue recommends for the model, and the directory in which workers cache
    measurements."""
    measurements = str(home() / "measurements")
    draft_path = str(draft or "")
    return _with_worker(
        engine,
        model=str(path),
        draft_model=draft_path,
        measurements=measurements,
        libraries=str(library_folder(home())),
        recommended_sampling=recommended_sampling(engine.worker.model, path),
    )


def check_reachable(address: str, option: str) -> None:
    """Raise Failure if no other host can connect to `address`, the value of `option`."""
    if not sockets.is_connectable(address):
        raise Failure(
            f"{option} {address}: the host must be one that other machines can connect to",
            exit_code=2,
        )


def _parts(cores: int, count: int) -> list[int]:
    """Return the number of threads of each of `count` engines that share `cores`. The first ones
    get one more if `cores` cannot be divided evenly."""
    return [max(1, cores // count + (number < cores % count)) for number in range(count)]


def _with_worker(engine: EngineConfig, **changes: object) -> EngineConfig:
    return _with(engine, worker=_with(engine.worker, **changes))
