"""`tidegate engine`: starts one engine of a cluster and its worker, without a gateway.

`run` does, in this order: make the configs from the options, check the device, lock the run
directory of the address, find the model, check it, start the engine, and watch it until it ends.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.config.engine import EngineConfig
from protocol.config.serve import SoloConfig
from protocol.config.worker import WorkerConfig
from protocol.process.lifeline import attach_if_supervised
from protocol.process.log_lines import LogStyle
from protocol.process.process_title import set_title
from protocol.wire.sockets import run_directory
from tools.commands.models import add_model, resolve
from tools.config_file import add_config_option
from tools.failure import Failure
from tools.flags import build
from tools.models.catalogue import DEFAULT
from tools.models.fetch import home
from tools.models.preflight import check_device, check_models, log_limits
from tools.option_groups import add_grouped_flags
from tools.processes import run_lock
from tools.processes.child_environment import warn_of_left_out
from tools.processes.children import Child
from tools.processes.engine_probe import EngineProbe
from tools.processes.serve_commands import engine_command
from tools.processes.server_log import ServerLog, keeping
from tools.processes.start_checks import check_installation, check_key, check_paths
from tools.processes.topology import check_reachable, in_cluster, with_model
from tools.processes.watch import supervise
from tools.terminal import Terminal, log_style

DESCRIPTION = """\
Start one engine of a cluster and its worker. Gateways on any host connect to it (`tidegate serve
--prefill ... --decode ...`). An engine with the role prefill computes prompts; one with the role
decode continues from them. All hosts need the same cluster key, model, --dtype and --block-tokens.
Ctrl-C lets open requests finish and then stops the engine; a second Ctrl-C stops it at once.
"""

EXAMPLES = """\
example with three hosts that share a cluster.key (tidegate cluster-key cluster.key):
  a$ tidegate engine --role prefill --address tcp://0.0.0.0:5600 --kv-address tcp://a:5601 \\
       --cluster-key cluster.key
  b$ tidegate engine --role decode --address tcp://0.0.0.0:5600 --cluster-key cluster.key
  c$ tidegate serve --prefill tcp://a:5600 --decode tcp://b:5600 --cluster-key cluster.key
"""

CONFIGS = (
    ("the supervisor", SoloConfig),
    ("the engine", EngineConfig),
    ("the worker", WorkerConfig),
)
IN_USE = ("an engine already runs at this address ({})", "--address")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_config_option(parser, CONFIGS)
    configs = [config for _, config in CONFIGS]
    add_grouped_flags(parser, configs, also_first=("role", "kv_address", "cluster_key"))


def plan(
    options: Mapping[str, Any], style: LogStyle = "text"
) -> tuple[SoloConfig, EngineConfig, Path]:
    """Return the configs that the options describe, and the engine's run directory.

    style   format of the log lines of all processes

    `worker.model` is the MODEL of the command line, not yet a path. Raises Failure, with the exit
    code of a usage error, if options contradict each other.
    """
    try:
        solo = build(SoloConfig, options)
        directory = directory_of(solo.address)
        address = f"ipc://{directory / 'worker.sock'}"
        model = options["model"] or DEFAULT
        worker = build(WorkerConfig, options, model=model, address=address, log_format=style)
        engine = build(EngineConfig, options, worker=worker, address=solo.address, log_format=style)
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
    if engine.role == "prefill" and not solo.kv_address:
        raise Failure(
            "--role prefill needs --kv-address, where decode engines fetch the K/V", exit_code=2
        )
    if solo.kv_address:
        check_reachable(solo.kv_address, "--kv-address")
    return solo, in_cluster(engine, solo.cluster_key, solo.kv_address), directory


def directory_of(address: str) -> Path:
    """Return the run directory of the engine at `address`. Its name is a short hash of the address,
    because the path of a socket must not be long."""
    name = hashlib.sha256(address.encode()).hexdigest()[:12]
    return run_directory(0).parent / f"engine-{name}"


def run(options: argparse.Namespace) -> int:
    started = time.monotonic()
    attach_if_supervised(signal.SIGQUIT)  # started by the launcher of a cluster
    terminal = Terminal(log_style(options.log_format))
    check_paths([config for _, config in CONFIGS], vars(options))
    solo, engine, directory = plan(vars(options), terminal.style)
    check_installation(["torch"])
    check_key(engine.cluster_key)
    check_device(engine.worker.device)
    with (
        run_lock.holding(directory, IN_USE) as lock,
        keeping(directory, solo.log_file_mib, terminal) as log,
    ):
        draft = engine.worker.draft_model
        path = resolve(engine.worker.model, home(), terminal.progress)
        draft_path = resolve(draft, home(), terminal.progress) if draft else None
        engine = with_model(engine, path, draft_path)
        log_limits(check_models(engine.checked_workers).plans, terminal)
        return _serve(solo, engine, lock, started, terminal, log)


def _serve(
    solo: SoloConfig,
    engine: EngineConfig,
    lock: int,
    started: float,
    terminal: Terminal,
    log: ServerLog,
) -> int:
    set_title("supervisor")

    def log_start(children: Sequence[Child]) -> None:
        terminal.log(f"engine started (pid {children[0].pid}); model {engine.worker.model}")
        warn_of_left_out(terminal)

    def show_banner(model: str | None) -> None:
        run_lock.describe(lock, run_lock.LockFacts(url=engine.address, model=model or ""))
        terminal.show(_banner(engine, model, time.monotonic() - started))

    run_lock.describe(lock, run_lock.LockFacts(url=engine.address))
    return supervise(
        [engine_command("engine", engine, lock)],
        EngineProbe(engine, "tidegate engine"),
        terminal,
        start_timeout_s=solo.start_timeout_s,
        drain_s=solo.drain_s,
        max_restarts=solo.max_restarts,
        on_started=log_start,
        on_listening=lambda: None,
        on_ready=show_banner,
        log=log,
    )


def _banner(engine: EngineConfig, model: str | None, seconds: float) -> str:
    meaning = {
        "prefill": "computes prompts for other engines",
        "decode": "continues from prompts that other engines computed",
        "both": "computes prompts and answers",
    }[engine.role]
    if engine.is_group:
        meaning = f"computes answers with {engine.tensor_parallel} workers"
    export = f"\n  other engines fetch K/V from {engine.worker.kv_address}"
    return f"""
This engine serves {model} at {engine.address}  (ready in {seconds:.1f} s)
  role {engine.role}: {meaning}{export * engine.worker.kv_export}

Press Ctrl-C to stop.
"""
