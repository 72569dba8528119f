"""The servers that are compared: how each is started and stopped, and when it is ready.

Each runs with the options that its documentation recommends for a CPU, on all cores available.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.plan import STREAMS
from tests.support.ports import free_port
from tools.http.web import WebServer

MAX_LEN = 4096
START_TIMEOUT_S = 600.0
STOP_S = 30.0
LAST_CHARS = 3000
FIRST, PLAIN, VLLM, LLAMA_CPP = "Tidegate", "Tidegate without prefix cache", "vLLM", "llama.cpp"


class NoStart(Exception):
    """A server did not become ready. The message has the last lines that it printed."""


@dataclass(frozen=True)
class Competitor:
    """A server of the comparison.

    command     command line; "{port}" in it is replaced
    ready_path  path that answers 200 when the server is ready
    per_stream  requests per stream, see plan.Pace
    has_curve   whether it takes part in all loads, or only in PREFIX
    """

    name: str
    command: Sequence[str]
    ready_path: str
    per_stream: float
    environment: Mapping[str, str] = field(default_factory=dict)
    has_curve: bool = True


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def tidegate(gguf: Path, options: Sequence[str]) -> list[Competitor]:
    """Return two servers: Tidegate with its prefix cache, and without."""
    command = [sys.executable, "-P", "-m", "tools", "serve", str(gguf), "--port", "{port}"]
    command += ["--max-len", str(MAX_LEN), "--max-slots", str(max(STREAMS)), *options]
    return [
        Competitor(FIRST, command, "/readyz", 2.0),
        Competitor(PLAIN, [*command, "--no-prefix-cache"], "/readyz", 1.0, has_curve=False),
    ]


def vllm(venv: Path, model: Path) -> Competitor:
    """Return vLLM's CPU build, bound to our cores. tcmalloc and the OpenMP runtime in `venv` are
    preloaded if they exist."""
    first = [
        library
        for library in (ctypes.util.find_library("tcmalloc_minimal"), venv / "lib/libiomp5.so")
        if library is not None and (isinstance(library, str) or library.exists())
    ]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        "LD_PRELOAD": ":".join(map(str, first)),
    }
    command = [str(venv / "bin" / "vllm"), "serve", str(model), "--port", "{port}"]
    command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_LEN)]
    return Competitor(VLLM, command, "/health", 2.0, environment)


def llama_cpp(binary: Path, gguf: Path) -> Competitor:
    """Return `llama-server` with a slot for each of max(STREAMS) streams. The slots share one
    cache."""
    places, threads = str(max(STREAMS)), str(len(cores()))
    command = [str(binary), "--model", str(gguf), "--port", "{port}", "--parallel", places]
    command += ["--kv-unified", "--ctx-size", str(max(STREAMS) * 512), "--threads", threads]
    return Competitor(LLAMA_CPP, command, "/health", 1.0)


@contextlib.contextmanager
def running(competitor: Competitor) -> Iterator[tuple[str, float]]:
    """Start a server, and yield (URL, seconds until it was ready). Raises NoStart."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [word.format(port=port) for word in competitor.command]
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **competitor.environment},
            start_new_session=True,
        )
        try:
            server = WebServer(url)
            while (answer := server.get(competitor.ready_path, 1.0)) is None or answer[0] != 200:
                waited = time.perf_counter() - began
                if process.poll() is not None or waited > START_TIMEOUT_S:
                    output.seek(0)
                    words = output.read().decode(errors="replace")[-LAST_CHARS:]
                    raise NoStart(f"{competitor.name} is not ready after {waited:.0f} s:\n{words}")
                time.sleep(0.02)
            yield url, time.perf_counter() - began
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the server. When it has ended, or after STOP_S, kill what is left of its process
    group."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_bf16(gguf: Path, directory: Path) -> None:
    """Write the weights of a GGUF file, dequantised to bfloat16, as a Hugging Face directory."""
    import torch
    from transformers import LlamaForCausalLM

    from tests.support.reference import load_reference

    exact, tokenizer = load_reference(gguf)
    config = exact.config
    del config.quantization_config  # a model "quantised with gguf" is not written
    config.dtype = torch.bfloat16
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(exact.state_dict())
    model.to(dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
