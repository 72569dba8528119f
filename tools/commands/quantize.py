"""`tidegate quantize`: writes a model of safetensors as a smaller GGUF file.

A process of the worker writes the file, and this module shows the progress.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tqdm import tqdm

from protocol.process.exit_codes import ExitCode
from protocol.tools.quantize import TYPES, QuantizeJob, QuantizeProgress
from tools.commands.models import resolve
from tools.failure import Failure
from tools.models.fetch import format_size, home
from tools.paths import user_path
from tools.processes.children import messages_of, module_command

DESCRIPTION = """\
Write a model of safetensors files as a quantised GGUF file, which needs less memory and is faster
on a CPU. `tidegate serve` and llama.cpp read the file. It has the tokenizer and the chat template.
"""

EXAMPLES = """\
examples:
  tidegate quantize Qwen/Qwen3-0.6B qwen3-0.6b-q4.gguf
  tidegate quantize ./my-finetune --type Q8_0 my-finetune.gguf
  tidegate serve my-finetune.gguf

types, from small to large, with the bits that a weight takes in the file:
  Q4_0 4.5, Q4_K 4.5     smallest; Q4_K is more exact
  Q4_K_M 4.8             the usual choice: Q4_K, and Q6_K where an error does most harm
  Q4_1 5, Q5_0 5.5, Q5_K 5.5, Q5_1 6
  Q6_K 6.6               hardly any loss
  Q8_0 8.5               no loss that can be measured

The head is stored in Q6_K or Q8_0. Rows that are not multiples of 256 weights are stored in Q5_0,
Q5_1 or Q8_0 instead of Q4_K, Q5_K or Q6_K.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face directory, or OWNER/REPO on the Hugging Face Hub",
    )
    parser.add_argument("output", metavar="FILE", help="the file to write")
    parser.add_argument(
        "--type",
        default=TYPES[0],
        choices=TYPES,
        help=f"type of the weights (default {TYPES[0]})",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(options: argparse.Namespace) -> int:
    output = user_path(options.output).absolute()
    _check_output(output, force=options.force)
    model = resolve(options.model, home())
    if not model.is_dir():
        raise Failure(
            f"{model} is not a directory of safetensors files, which alone can be quantised",
            exit_code=ExitCode.BAD_MODEL,
        )
    job = QuantizeJob(model=str(model), output=str(output), type=options.type)
    with tqdm(unit="B", unit_scale=True, disable=None) as bar:  # None: only on a terminal
        for progress in quantize(job):
            bar.total = progress.total_bytes
            bar.set_postfix_str(progress.tensor, refresh=False)
            bar.update(progress.written_bytes - bar.n)
    print(f"{output}: {format_size(output.stat().st_size)}")
    return 0


def _check_output(output: Path, *, force: bool) -> None:
    """Raise Failure if `output` is not a .gguf file in an existing directory, or if the file exists
    and `force` is False."""
    if output.suffix != ".gguf":
        raise Failure(f"{output.name}: the name must end with .gguf", exit_code=ExitCode.USAGE)
    if output.exists() and not force:
        raise Failure(f"{output} exists; --force replaces it", exit_code=ExitCode.USAGE)
    if not output.parent.is_dir():
        raise Failure(f"{output.parent} is not a directory", exit_code=ExitCode.USAGE)


def quantize(job: QuantizeJob) -> Iterator[QuantizeProgress]:
    """Run the job in a process of the worker. Yield its progress. Raises Failure, with the error of
    that process, if it fails."""
    command = module_command("worker.quantize", msgspec.json.encode(job).decode())
    return messages_of(command, QuantizeProgress, "the quantiser", exit_codes=[ExitCode.BAD_MODEL])
