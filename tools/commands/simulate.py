"""`tidegate simulate`: predicts how a cluster serves a workload, in simulated time.

A child process (`simulator`) simulates, and this module prints its results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.process.exit_codes import ExitCode
from protocol.tools.bench import StepBench, StepBenchLine
from protocol.tools.simulation import (
    SimulatedMachine,
    SimulationConfig,
    SimulationFailed,
    SimulatorLine,
)
from tools.bench.report import aligned
from tools.bench.simulation import answer, page, result_table, search_table
from tools.commands.bench_step import measure as measure_steps
from tools.commands.models import resolve
from tools.failure import Failure
from tools.flags import add_flags, build, flags_of
from tools.libraries.catalogue import library_folder
from tools.models.fetch import home
from tools.paths import user_path
from tools.processes.children import messages_of, module_command
from tools.terminal import memory_size

DESCRIPTION = """\
Predict how a cluster serves a workload: time to first token, time between tokens, throughput, cache
hits, refusals. The real scheduler, block pool, prefix cache, queue and router decide; only time is
simulated. Step times are estimated from the GPU and the model, or measured. No GPU is needed.
"""

EXAMPLES = """\
examples:
  tidegate simulate llama-3.1-8b --hardware H100 --rate 20          one H100, random arrivals
  tidegate simulate llama-3.1-70b --hardware H200 --tensor-parallel 4 --replicas 3 --rate 12
  tidegate simulate qwen3-8b --rate 200 --target-ttft-p99 0.5       how many GPUs are needed?
  tidegate simulate qwen3-8b --trace day.csv --target-ttft-p99 0.5
  tidegate simulate path/to/config.json --workload chat --rate 30 --prefix-tokens 1500 --prefixes 20
  tidegate simulate llama-3.1-8b --rate 300 --replicas 16 --routing random --html random.html
  tidegate simulate --list                                          the GPUs and models of the table

with measured step times:
  tidegate simulate smollm2-135m --measure --steps here.json        measure a model on this machine
  tidegate simulate --steps here.json --kv-blocks 4000 --rate 2
  tidegate serve --journal /var/tmp/journals                        or record a server under load
  tidegate simulate --steps /var/tmp/journals --rate 2

at scale: 1,000 replicas, 100,000 requests per second (8 min on 2 cores)
  tidegate simulate llama-3.1-8b --replicas 1000 --rate 100000 --gateways 16 --processes 2 \\
      --prefixes 5000 --prefix-tokens 1000 --input-tokens 64 --output-tokens 64
"""

ENGINE_FIELDS = {
    *("token_budget", "steps_in_flight", "prefix_cache", "max_waiting", "max_waiting_tokens"),
    "state_interval",
}
WORKER_FIELDS = {"max_slots", "max_len", "block_tokens", "kv_blocks", "gpu_memory"}
"""Options of engines and workers that a simulation follows."""

MEASURED = (
    # (new tokens per request, batch sizes, context lengths)
    (1, (1, 2, 4, 8, 16, 32), (128, 1024)),
    (16, (1, 4), (0, 512)),
    (64, (1, 2), (0, 512)),
    (128, (1, 2), (0, 512)),
    (256, (1,), (0, 512)),
)
"""The steps that --measure times."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model of the table (--list), or a config.json; with --measure as for `serve`",
    )
    parser.add_argument("--list", action="store_true", help="print the tables of GPUs and models")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure steps of MODEL on this machine and write them to --steps; nothing is "
        "simulated, and no server should run at the same time",
    )
    parser.add_argument("--json", default="", metavar="FILE", help="file for all figures, as JSON")
    parser.add_argument("--html", default="", metavar="FILE", help="file for a page with plots")
    add_flags(parser, SimulationConfig, title="the simulation")
    add_flags(parser, EngineConfig, title="the engines", without=_others(EngineConfig))
    add_flags(parser, WorkerConfig, title="the workers", without=_others(WorkerConfig))


def _others(config: type[msgspec.Struct]) -> set[str]:
    """Return the fields of a config that a simulation ignores."""
    return {flag.field for flag in flags_of(config)} - ENGINE_FIELDS - WORKER_FIELDS


def run(options: argparse.Namespace) -> int:
    if options.list:
        return subprocess.run(module_command("simulator", "--list")).returncode
    if options.measure:
        return _measure(options)
    config = _config(options)
    machine, results = None, []
    for line in simulate(config):
        if isinstance(line, SimulationFailed):
            raise Failure(line.message, exit_code=ExitCode.USAGE)
        if isinstance(line, SimulatedMachine):
            machine = line
            print(_machine_text(machine) + "\n", flush=True)
        else:
            results.append(line)
            if sys.stderr.isatty() and config.target_ttft_p99:
                print(f"{line.replicas} replicas: {answer([line], config)}", file=sys.stderr)
    if machine is None or not results:
        raise Failure("the simulation ended without a result")
    if config.target_ttft_p99:
        print(aligned(search_table(results)) + "\n")
    print(aligned(result_table(results[-1])))
    print("\n" + answer(results, config))
    if options.json:
        described = [msgspec.to_builtins(config), machine, *results]
        Path(options.json).write_bytes(msgspec.json.encode(described) + b"\n")
    if options.html:
        Path(options.html).write_text(page(_machine_text(machine), results, config), "utf-8")
    return 0 if results[-1].meets_target in (None, True) else 1


def simulate(config: SimulationConfig) -> Iterator[SimulatorLine]:
    """Run the simulator in a child process, and yield its lines as they arrive. Raises Failure,
    with the child's error, if it crashes."""
    encoded = msgspec.json.encode(config).decode()
    command = module_command("simulator", "--config", encoded)
    return messages_of(command, SimulatorLine, "the simulation")


def _config(options: argparse.Namespace) -> SimulationConfig:
    try:
        worker = build(WorkerConfig, _only(options, WORKER_FIELDS), model="")
        engine = build(EngineConfig, _only(options, ENGINE_FIELDS), worker=worker)
        given = vars(options)
        model = options.model or ""
        if model.endswith(".json"):
            model = str(user_path(model).absolute())
        return build(SimulationConfig, given, engine=engine, model=model)
    except ValueError as error:
        raise Failure(str(error), exit_code=ExitCode.USAGE) from None


def _only(options: argparse.Namespace, fields: set[str]) -> dict[str, object]:
    return {name: value for name, value in vars(options).items() if name in fields}


def _machine_text(machine: SimulatedMachine) -> str:
    text = (
        f"steps: {machine.steps}\neach replica: {machine.num_blocks:,} blocks of "
        f"{machine.block_tokens} tokens, {machine.max_slots} slots, {machine.token_budget:,} "
        f"tokens per step, max_len {machine.max_len:,}"
    )
    if not machine.state_bytes:
        return text
    size, num = memory_size(machine.state_bytes), machine.num_checkpoints
    total = memory_size(machine.state_bytes * (machine.max_slots + num))
    text += f"\nrecurrent states: {size} for each slot and for {num:,} checkpoints, {total} in all"
    if machine.token_bytes:
        kv = f"{machine.token_bytes / 1024:.1f} KiB of K/V for each token"
        text += f"\na cached prefix: {kv}, and a checkpoint at its end and after each "
        text += f"{machine.state_interval:,} tokens"
    return text


def _measure(options: argparse.Namespace) -> int:
    """Time steps of a model on this machine, and write them to a file."""
    if not options.steps or not options.model:
        raise Failure("--measure needs MODEL and --steps FILE", exit_code=ExitCode.USAGE)
    worker = build(
        WorkerConfig,
        _only(options, {"block_tokens"}),
        model=str(resolve(options.model, home())),
        measurements=str(home() / "measurements"),
        libraries=str(library_folder(home())),
    )
    lines = []
    for new_tokens, batch, context in MEASURED:
        config = StepBench(worker=worker, new_tokens=new_tokens, batch=batch, context=context)
        found: list[StepBenchLine] = [*measure_steps(config)]
        lines.append(msgspec.json.encode(found))
        print(f"{new_tokens} new tokens: {len(found) - 1} kinds of steps", flush=True)
    user_path(options.steps).write_bytes(b"\n".join(lines) + b"\n")
    return 0
