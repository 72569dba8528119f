"""Measures the memory of a gateway's processes that serve one model without an engine.

    python -m tests.benchmarks.footprint [MODEL]

MODEL is a GGUF file, a directory or a name; the default is that of `tidegate serve`. The gateway
runs with `--render-only`, and tokenizes a text before its memory is read. Two figures are printed
for each process: its resident memory, which includes pages that other processes share, and the part
that it does not share.
"""

from __future__ import annotations

import argparse

import psutil
import requests

from tests.support.model import smollm2_gguf
from tests.support.ports import free_port
from tests.support.processes import Program

TEXT = "The ship left the harbour at dawn. " * 100


def measure(model: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["-P", "-m", "tools", "serve", model, "--port", str(port), "--render-only"]
    with Program(command) as program:
        program.line_with("ready in", timeout_s=120.0)
        name = requests.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        requests.post(
            f"{url}/tokenize", json={"model": name, "prompt": TEXT}, timeout=30
        ).raise_for_status()
        for each in psutil.Process(program.process.pid).children(recursive=True):
            memory = each.memory_full_info()
            print(
                f"{model}: {each.name()} {each.pid}, child of {each.ppid()}: resident "
                f"{memory.rss >> 20} MiB, its own {memory.uss >> 20} MiB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.footprint")
    parser.add_argument("model", nargs="?", help="a GGUF file (default: the default model)")
    measure(parser.parse_args().model or str(smollm2_gguf()))


if __name__ == "__main__":
    main()
