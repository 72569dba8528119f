"""`tidegate bench step`: measures one step of the worker and its parts.

A child process (`worker.benchmark`) measures, and this module prints the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from protocol.config.worker import WorkerConfig
from protocol.process.exit_codes import ExitCode
from protocol.process.malloc import huge_page_environment
from protocol.tools.bench import PARTS, StepBench, StepBenchLine, StepBenchReady, StepTiming
from tools.bench.report import aligned
from tools.commands.models import add_model, resolve
from tools.failure import Failure
from tools.flags import add_flags, build
from tools.libraries.catalogue import library_folder
from tools.models.catalogue import DEFAULT
from tools.models.fetch import home
from tools.option_groups import add_grouped_flags
from tools.paths import user_path
from tools.processes.children import messages_of, module_command

DESCRIPTION = """\
Measure one step of the worker by batch size and context length: its time, and the share of each
part. No server is needed. No server should run at the same time.
"""

EXAMPLES = """\
examples:
  tidegate bench step --batch 1,8,32 --context 128,1024
  tidegate bench step model.gguf --new-tokens 256 --batch 1 --context 0       a prompt
  tidegate bench step model.gguf --dtype float32 --threads 1
  tidegate bench step --random config.json --batch 1,64,256    a model that is not downloaded
"""

FIXED = frozenset(
    {"max_slots", "max_len", "kv_blocks", "kv_memory_gib", "poison_slots", "kv_mover"}
)
"""Fields of WorkerConfig that the benchmark sets itself, or that do not affect a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--random",
        default="",
        metavar="FILE",
        help="config.json of a Hugging Face model, to measure the model with random weights; "
        "instead of MODEL",
    )
    parser.add_argument("--json", default="", metavar="FILE", help="file for all figures, as JSON")
    add_flags(parser, StepBench, title="the steps")
    add_grouped_flags(parser, [WorkerConfig], without=FIXED)


def run(options: argparse.Namespace) -> int:
    try:
        model = _model(options)
        worker = build(
            WorkerConfig,
            {**vars(options), **dict.fromkeys(FIXED)},
            model=model,
            measurements=str(home() / "measurements"),  # so the kernels are those of a server
            libraries=str(library_folder(home())),
        )
        config = build(StepBench, vars(options), worker=worker)
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
    lines = measure(config)
    ready = next(lines)
    assert isinstance(ready, StepBenchReady)
    print(
        f"{ready.model}, {ready.dtype}, {ready.device}, {ready.threads} threads; "
        f"{_workload(config)}\n"
    )
    timings = [line for line in lines if isinstance(line, StepTiming)]
    print(table(timings))
    if options.json:
        Path(options.json).write_bytes(msgspec.json.encode([ready, *timings]) + b"\n")
    return 0


def _model(options: argparse.Namespace) -> str:
    """Return the path of the model, or of the config.json that describes it."""
    if not options.random:
        return str(resolve(options.model or DEFAULT, home()))
    if options.model:
        raise Failure("MODEL and --random exclude each other", exit_code=ExitCode.USAGE)
    path = user_path(options.random).absolute()
    if path.suffix != ".json" or not path.is_file():
        raise Failure(f"--random: {path} is not a JSON file", exit_code=ExitCode.BAD_MODEL)
    return str(path)


def measure(config: StepBench) -> Iterator[StepBenchLine]:
    """Run the benchmark in a child process. Yield its results as they arrive. Raises Failure, with
    the child's error, if it fails."""
    encoded = msgspec.json.encode(config).decode()
    command = module_command("worker.benchmark", "--config", encoded)
    environment = huge_page_environment()  # as the engine starts a worker
    return messages_of(command, StepBenchLine, "the benchmark", environment=environment)


def table(timings: Sequence[StepTiming]) -> str:
    """Return a table with a row per kind of step. Each part is shown as its share of the sum of all
    parts."""
    heads = ["context", "batch", "step ms", "best", "p90", "tokens/s", *PARTS]
    rows = [[str(timing.context), *_cells(timing)] for timing in timings]
    return aligned([heads, *rows])


def _cells(timing: StepTiming) -> list[str]:
    times = (f"{s * 1e3:.1f}" for s in (timing.step_s, timing.best_s, timing.p90_s))
    whole = sum(timing.parts_s.values())
    tokens_per_s = timing.batch * timing.new_tokens / timing.step_s
    shares = (f"{timing.parts_s[part] / whole:.0%}" for part in PARTS)
    return [str(timing.batch), *times, f"{tokens_per_s:,.0f}", *shares]


def _workload(config: StepBench) -> str:
    tokens = "token" if config.new_tokens == 1 else "tokens"
    return (
        f"{config.new_tokens} new {tokens} per request, {config.sampling}, "
        f"median of {config.steps} steps"
    )
