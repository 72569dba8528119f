"""Runs some tests of the kernels under NVIDIA's compute-sanitizer, which finds wrong addresses and
races."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tests.gpu.kernels import REHEARSED, file_of
from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, NotPossible, checked
from tests.support.processes import ROOT
from tests.support.triton_device import DEVICE

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
FOUND = 86
"""The exit code with which the sanitizer reports an error."""


def check_memory(session: GpuSession) -> Iterator[GpuRow]:
    if shutil.which(PROGRAM) is None:
        raise NotPossible(f"{PROGRAM} is not on PATH")
    for tool in TOOLS:
        for part, words in REHEARSED.items():
            code = _code(session, tool, part, words)
            text = "no error" if code == 0 else "errors, see the log" if code == FOUND else ""
            text = text or f"the tests ended with code {code}"
            yield checked(f"{tool}, {part}", text, is_right=code == 0)


def _code(session: GpuSession, tool: str, part: str, words: str) -> int:
    """Run some tests of a part of the kernels under a tool, and return the exit code."""
    command = [
        *(PROGRAM, "--tool", tool, "--error-exitcode", str(FOUND)),
        *(sys.executable, "-m", "pytest", "-q", file_of(part)),
        *("-k", words, "-o", "filterwarnings=", "-p", "no:cacheprovider"),
    ]
    # The sanitizer sees the borders of tensors only if each is an allocation of its own.
    environment = {
        **os.environ,
        DEVICE: str(session.device),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    return subprocess.run(command, cwd=ROOT, env=environment).returncode
