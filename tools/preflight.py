"""Whether models can be served here, asked of the worker's room before a server starts.

Only that room can read a model's files. It runs as a process of its own, which imports no torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from protocol.config.worker import WorkerConfig
from protocol.exit_codes import ExitCode
from protocol.preflight import ModelPlan, Preflight
from tools.children import last_words
from tools.failure import Failure

TIMEOUT_S = 120


def preflight(workers: Sequence[WorkerConfig]) -> Preflight:
    """Return what is known of the workers of one server. Raises Failure if that cannot be asked."""
    configs = msgspec.json.encode(workers).decode()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "worker.preflight", configs],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"reading the model's files took more than {TIMEOUT_S} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise Failure(f"reading the model's files failed: {last_words(lines)}")
    return msgspec.json.decode(done.stdout, type=Preflight)


def check_models(workers: Sequence[WorkerConfig]) -> list[ModelPlan]:
    """Return a plan for each worker. Raises Failure, in one line with a remedy, if one of them
    could not serve its model."""
    found = preflight(workers)
    if found.error:
        raise Failure(f"{found.error}; {found.remedy}", exit_code=ExitCode.BAD_MODEL)
    return found.plans


def limit(plan: ModelPlan) -> str | None:
    """Return why requests may not be as long as the model was made for; None if they may."""
    if plan.max_len < plan.context_tokens:
        return (
            f"requests are limited to {plan.max_len:,} of the model's "
            f"{plan.context_tokens:,} tokens (--max-len, --kv-memory-gib)"
        )
    if plan.window is not None:
        return f"requests are limited to the model's attention window of {plan.window:,} tokens"
    return None
