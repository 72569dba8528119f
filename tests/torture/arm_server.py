"""Serves the default model on emulated ARM processors, and compares the answer with this machine's.

    python -m tests.torture.arm_server [--sets neon] [--tokens 50] [--root FOLDER] [--qemu PATH]

`tidegate serve` runs as users start it: its supervisor, engine, worker and gateway are processes
of Python for ARM, which qemu-aarch64 emulates (arm.py). It answers the first request of the README,
and so does a server of this machine, both with the number types that give the same bits on every
processor. The text must be equal, and what `system_fingerprint` says of the model and of all that
computes. Logprobs may differ by SLACK, because torch computes them, from equal logits.

If a program is missing, the command says so and does nothing. --help of tests.torture.arm says what
is needed.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests.support.model import smollm2_gguf
from tests.support.ports import free_port
from tests.support.processes import ROOT, Program
from tests.support.server import Server
from tests.torture.arm import (
    EMULATED,
    ArmSystem,
    argument_parser,
    compile_set,
    made_system,
)
from tests.torture.table import print_table
from worker.device.cpuinfo import cpu_flags
from worker.kernels.instruction_sets import InstructionSet
from worker.kernels.library import FOLDER, first_compiled, runnable

SAME_BITS = ("--dtype", "float32", "--activations", "int8", "--kv-dtype", "bfloat16")
SLACK = 1e-6
"""By how much a logprob may differ."""
MOST_S = 3600
"""Seconds in which an emulated server must be ready, and must have answered."""
COLUMNS = {"set": 10, "processor": 14, "ready s": 8, "answer s": 9, "answer": 0}


@dataclass(frozen=True)
class ArmServerRow:
    """The answer of an emulated server, and that of this machine."""

    instructions: InstructionSet
    ready_s: float
    answer_s: float
    answer: dict[str, Any]
    expected: dict[str, Any]
    failure: str = ""

    def cells(self) -> tuple[str, ...]:
        name = self.instructions.name
        times = (f"{self.ready_s:.0f}", f"{self.answer_s:.0f}")
        return name, EMULATED[name], *times, repr(self.answer.get("text"))

    def complaints(self, slack: float) -> list[str]:
        if self.failure:
            return [self.failure]
        found = [
            f"{part}: {self.answer[part]!r}, here {self.expected[part]!r}"
            for part in ("text", "fingerprint")
            if self.answer[part] != self.expected[part]
        ]
        here, there = self.expected["logprobs"], self.answer["logprobs"]
        if len(here) != len(there):
            return [*found, f"{len(there)} tokens, here {len(here)}"]
        found += [
            f"logprob of token {place}: {other}, here {one}"
            for place, (one, other) in enumerate(zip(here, there, strict=True))
            if abs(one - other) > SLACK
        ]
        return found


def answer_of(url: str, tokens: int) -> dict[str, Any]:
    """Return the parts of a server's answer that must be equal."""
    body: Any = {
        "messages": [{"role": "user", "content": "Name three fruits."}],
        "temperature": 0,
        "max_tokens": tokens,
        "logprobs": True,
    }
    reply = requests.post(f"{url}/v1/chat/completions", json=body, timeout=MOST_S)
    reply.raise_for_status()
    answer = reply.json()
    choice = answer["choices"][0]
    return {
        "text": choice["message"]["content"],
        "logprobs": [each["logprob"] for each in choice["logprobs"]["content"]],
        # Its first two parts name the version, which the copied sources do not know.
        "fingerprint": answer["system_fingerprint"].split("-")[-2:],
    }


def source_digest() -> int:
    """Return the digest of the kernels' source that this machine's library was compiled with."""
    name = first_compiled(runnable(cpu_flags()))
    library = ctypes.CDLL(str(next(FOLDER.glob(f"_{name}.*"))))
    library.source_digest.restype = ctypes.c_int64
    return int(library.source_digest())


def copy_sources(folder: Path) -> None:
    """Copy the files of the working tree that git lists, without what is compiled for this
    machine."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def emulated_answer(
    instructions: InstructionSet, system: ArmSystem, folder: Path, tokens: int
) -> tuple[float, float, dict[str, Any]]:
    """Start a server from the sources in `folder`. Return the seconds until it was ready, those of
    its answer, and the answer."""
    port = free_port()
    path = f"{system.packages}:{folder}"
    timeouts = ("--start-timeout-s", str(MOST_S))
    serve = ("-P", "-m", "tools", "serve", str(smollm2_gguf()), "--port", str(port))
    start = time.monotonic()
    with Program(
        [*serve, *timeouts, *SAME_BITS, "--kernels", instructions.name],
        program=str(system.launcher(EMULATED[instructions.name])),
        environment={"PYTHONPATH": path, "TIDEGATE_HOME": str(folder / "home")},
        cwd=folder,
    ) as server:
        server.line_with("ZeroMQ:", timeout_s=MOST_S)
        ready = time.monotonic()
        answer = answer_of(f"http://127.0.0.1:{port}", tokens)
        seconds = time.monotonic() - ready
        server.signal(signal.SIGTERM)  # its processes write below `folder` until they end
        server.end(timeout_s=MOST_S)
        return ready - start, seconds, answer


def outcomes(
    sets: Sequence[InstructionSet], system: ArmSystem, tokens: int
) -> Iterator[ArmServerRow]:
    with Server(*SAME_BITS) as server:
        expected = answer_of(server.url, tokens)
    for each in sets:
        with tempfile.TemporaryDirectory(prefix="tidegate-arm-") as name:
            folder = Path(name)
            copy_sources(folder)
            compile_set(each, folder / "worker/kernels", f"-DSOURCE_DIGEST={source_digest()}")
            try:
                yield ArmServerRow(each, *emulated_answer(each, system, folder, tokens), expected)
            except (AssertionError, requests.RequestException) as error:
                yield ArmServerRow(each, 0, 0, {}, expected, failure=str(error))


def main(arguments: Sequence[str]) -> int:
    parser = argument_parser("arm_server", __doc__, "neon")
    parser.add_argument("--tokens", type=int, default=50, help="length of the answer")
    options = parser.parse_args(arguments)
    system = made_system(options)
    if system is None:
        return 0
    return print_table(COLUMNS, outcomes(options.sets, system, options.tokens), 1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
