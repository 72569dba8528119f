"""Prepares the launcher of `tidegate serve --cluster`, without importing Ray."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from protocol.config.cluster import ClusterConfig
from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig
from protocol.config.serve import ServeConfig
from protocol.process.exit_codes import ExitCode
from protocol.process.log_lines import LogStyle
from protocol.wire.cluster_key import write_cluster_key
from tools.flags import to_arguments
from tools.models.catalogue import CATALOGUE, HUB_MODELS
from tools.paths import user_path
from tools.processes.children import Command, module_command
from tools.processes.run_lock import ENGINES_FILE, RUN_KEY

NAME = "cluster"
"""Name of the launcher in logs."""
START_GRACE_S = 15.0
"""Seconds that the supervisor waits longer than the launcher, which knows what is missing."""


def with_cluster(gateway: GatewayConfig, directory: Path) -> GatewayConfig:
    """Return the gateway's config, with the file that the launcher writes.

    directory   the run directory of the server
    """
    return msgspec.structs.replace(
        gateway,
        engines_file=str(directory / ENGINES_FILE),
        cluster_key=gateway.cluster_key or str(directory / RUN_KEY),
    )


def prepare_files(gateway: GatewayConfig, serve: ServeConfig) -> None:
    """Write the list of engines, which is still empty, and a new cluster key if none was given. The
    gateway reads the list before the launcher has connected to Ray."""
    Path(gateway.engines_file).write_text("")
    if not serve.cluster_key:  # the run directory is private
        Path(gateway.cluster_key).unlink(missing_ok=True)
        write_cluster_key(gateway.cluster_key)


def launcher_config(
    serve: ServeConfig, engine: EngineConfig, gateway: GatewayConfig, style: LogStyle = "text"
) -> ClusterConfig:
    """Return the config of the launcher. Raises ValueError if an option cannot be used with Ray.

    engine    one engine as the options describe it
    gateway   with the files of `with_cluster`
    """
    worker = engine.worker
    if worker.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {worker.device}: Ray chooses the GPUs; use --device cuda")
    if engine.role != "both":
        raise ValueError("--cluster and --role cannot be combined")
    for option in ("journal", "kv_events", "workers_elsewhere"):  # need one host of their own
        if getattr(engine, option):
            raise ValueError(f"--cluster and --{option.replace('_', '-')} cannot be combined")
    limits = f"--drain-s={gateway.drain_s}", f"--start-timeout-s={serve.start_timeout_s}"
    return ClusterConfig(
        cluster=serve.cluster,
        model=model_on_nodes(worker.model),
        cluster_key=gateway.cluster_key,
        engines_file=gateway.engines_file,
        arguments=[
            *to_arguments(engine),
            *to_arguments(worker, without=("device", "threads")),
            *limits,
        ],
        replicas=serve.replicas,
        device=worker.device,
        workers_per_replica=engine.tensor_parallel,
        cpus_per_replica=serve.cpus_per_replica,
        threads=worker.threads,
        environment=serve.cluster_env,
        start_timeout_s=serve.start_timeout_s,
        drain_s=gateway.drain_s,
        restart_limit=serve.restart_limit,
        log_format=style,
    )


def model_on_nodes(model: str) -> str:
    """Return MODEL as other hosts find it: the absolute path of a file or a directory, or else the
    name. Each node downloads a model with a name by itself."""
    path = user_path(model)
    is_path = model not in CATALOGUE and model not in HUB_MODELS and path.exists()
    return os.path.abspath(path) if is_path else model


def launcher_command(config: ClusterConfig, lock: int) -> Command:
    """Return the command that starts the launcher.

    lock   descriptor of the lock of the run directory
    """
    codes: dict[int, int] = {code: code for code in ExitCode if code is not ExitCode.OK}
    return Command(
        NAME,
        module_command("tools.cluster", "--config", msgspec.json.encode(config).decode()),
        keeps_open=[lock],
        exit_code=ExitCode.ENGINE_LOST,
        exit_codes=codes | {ExitCode.FAILED: ExitCode.ENGINE_LOST},
        log_format=config.log_format,
    )
