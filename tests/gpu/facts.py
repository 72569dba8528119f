"""Facts about the machine and the software of a run."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from tests.support.processes import ROOT

UNKNOWN = "unknown"


def run_facts() -> dict[str, str]:
    """Return what a reader of the table has to know about the run. Uses no GPU itself."""
    queried = "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "Tidegate's commit": _output(["git", "describe", "--always", "--dirty", "--abbrev=12"]),
        "GPU": _output(["nvidia-smi", queried, "--format=csv,noheader", "--id=0"]),
        "processor": f"{platform.processor() or platform.machine()}, Python "
        f"{platform.python_version()}",
        **{name: _version(name) for name in ("torch", "triton", "transformers", "vllm")},
    }


def _output(command: Sequence[str]) -> str:
    """Return the output of a program; UNKNOWN if there is no such program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
