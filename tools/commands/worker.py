"""`tidegate worker`: starts a worker that joins the group of an engine on another machine.

The command replaces itself by the worker process. So what starts it, such as torchrun or systemd,
watches the worker itself.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.config.worker import JoinConfig
from protocol.process.malloc import huge_page_environment
from protocol.wire import sockets
from protocol.wire.cluster_key import read_cluster_key
from tools.commands.models import add_model, resolve
from tools.failure import Failure
from tools.flags import add_flags, build
from tools.libraries.catalogue import library_folder
from tools.models.catalogue import DEFAULT
from tools.models.fetch import home
from tools.processes.child_environment import child_environment, warn_of_left_out
from tools.processes.children import module_command
from tools.processes.start_checks import check_installation
from tools.processes.topology import check_reachable
from tools.terminal import Terminal, log_style

DESCRIPTION = """\
Start a worker that computes for an engine on another machine, as one rank of its group
(--tensor-parallel). The engine sends it all settings except the options below. The worker ends with
the connection to the engine, and does not restart itself. All machines of a group need equal
processors or GPUs and the same libraries and model.
"""

EXAMPLES = """\
example with two machines that share a cluster.key (tidegate cluster-key cluster.key):
  a$ tidegate engine MODEL --address tcp://0.0.0.0:5600 --cluster-key cluster.key \\
       --tensor-parallel 2 --workers-elsewhere 1 --worker-address tcp://0.0.0.0:5610
  b$ tidegate worker MODEL --join tcp://a:5610 --cluster-key cluster.key

both ranks on machine b, with torchrun (and --workers-elsewhere 2 on machine a):
  b$ torchrun --nproc-per-node 2 -m tools worker MODEL --join tcp://a:5610 \\
       --cluster-key cluster.key
"""

TORCHRUN = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "torchrun_size": "WORLD_SIZE",
}
"""Field of JoinConfig -> the variable of torchrun that has its value."""
TORCHRUN_MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Further variables of torchrun, by which torch finds the other ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, default=DEFAULT)
    add_flags(parser, JoinConfig, title="the worker")
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of all log lines"
    )


def plan(options: Mapping[str, Any], environment: Mapping[str, str]) -> JoinConfig:
    """Return the worker's config, whose model is the MODEL of the command line. The variables of
    torchrun stand in for options that are not given. Raises Failure, with the exit code of a usage
    error, if a value is missing or wrong."""
    if not options["join"]:
        raise Failure("--join is required: the engine's --worker-address", exit_code=2)
    found, torchrun_size = dict(options), 0
    if all(name in environment for name in (*TORCHRUN.values(), *TORCHRUN_MEETING)):
        numbers: dict[str, Any] = {
            field: _number(name, environment[name]) for field, name in TORCHRUN.items()
        }
        torchrun_size = numbers.pop("torchrun_size")
        numbers["rendezvous"] = "env://"
        found |= {field: each for field, each in numbers.items() if found.get(field) is None}
    try:
        config = build(JoinConfig, found, model=options["model"], torchrun_size=torchrun_size)
        path = sockets.check_address(config.join, read_cluster_key(config.cluster_key))
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
    if path is not None:
        raise Failure(f"--join {config.join}: the engine's address is tcp://HOST:PORT", exit_code=2)
    check_reachable(config.join, "--join")
    return msgspec.structs.replace(
        config, local_rank=max(config.local_rank, 0), local_size=max(config.local_size, 1)
    )


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise Failure(f"${variable} is {text!r}, which is no number", exit_code=2) from None


def run(options: argparse.Namespace) -> int:
    terminal = Terminal(log_style(options.log_format))
    config = plan(vars(options), os.environ)
    check_installation(["torch"])
    path = resolve(config.model, home(), terminal.progress)
    draft = config.draft_model
    config = msgspec.structs.replace(
        config,
        model=str(path),
        draft_model=str(resolve(draft, home(), terminal.progress)) if draft else "",
        cluster_key=os.path.abspath(config.cluster_key),
        libraries=str(library_folder(home())),
        measurements=str(home() / "measurements"),
        log_format=terminal.style,
    )
    command = module_command("worker.join", msgspec.json.encode(config).decode())
    warn_of_left_out(terminal)
    os.execve(command[0], command, child_environment(huge_page_environment()))
