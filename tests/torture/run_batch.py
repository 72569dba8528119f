"""`python -m tests.torture.run_batch`: a batch run that is killed at random moments.

    python -m tests.torture.run_batch [--lines 5000] [--kills 3] [--engine-kills 1]

A server with a tiny model answers the lines. `tidegate run-batch` is killed (SIGKILL) each time a
random share of the lines has results, and started again with the same command. The server's engine
is killed meanwhile, too. In the end each line must have exactly one result, with status 200 and the
text that an uninterrupted run gets. The exit code is 1 if one has not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.support.batches import complaints, completion_lines, jsonl, results_in
from tests.support.processes import Program, descendants_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.support.waiting import eventually

RUN_S = 1800.0


def run_batch(source: Path, output: Path, *options: str) -> Program:
    return Program(["-P", "-m", "tools", "run-batch", str(source), str(output), *options])


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@dataclass(slots=True)
class KilledRun:
    """The figures of a run."""

    #: Number of results at each kill.
    kills: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def killed_run(
    url: str, folder: Path, count: int, kills: int, engine_kills: Sequence[Callable[[], None]] = ()
) -> KilledRun:
    """Run a batch of `count` lines to its end, with kills at random moments.

    kills          how often the run is killed
    engine_kills   functions that kill the server's engine, each called once
    """
    dice = random.Random()
    lines = completion_lines(count)
    source, output, reference = (folder / name for name in ("in.jsonl", "out.jsonl", "ref.jsonl"))
    source.write_text(jsonl(lines))
    found = KilledRun()
    victims: list[Callable[[], None] | None] = [None] * kills + [*engine_kills]
    dice.shuffle(victims)
    moments = sorted(dice.sample(range(1, count), len(victims)))
    started_at = time.monotonic()
    program = run_batch(source, output, "--url", url)
    for victim, moment in zip(victims, moments, strict=True):
        is_due = eventually(
            lambda: num_lines(output) >= moment or program.process.poll() is not None,  # noqa: B023
            within_s=RUN_S,
            every_s=0.002,
        )
        if not is_due or program.process.poll() is not None:
            found.wrong.append(f"the run ended early: {program.output}")
            break
        found.kills.append(num_lines(output))
        if victim is not None:
            victim()
            print(f"{found.kills[-1]} results; the engine is killed", flush=True)
            continue
        program.process.kill()
        program.end()
        print(f"{found.kills[-1]} results; the run is killed", flush=True)
        program = run_batch(source, output, "--url", url)
    with program:
        if (code := program.end(timeout_s=RUN_S)) != 0:
            found.wrong.append(f"the last run ended with {code}: {program.output}")
    found.seconds = time.monotonic() - started_at
    print(program.out[-1] if program.out else "", flush=True)
    results = results_in(output)
    found.wrong += complaints(lines, results)[:10]
    with run_batch(source, reference, "--url", url) as program:
        if program.end(timeout_s=RUN_S) != 0:
            found.wrong.append(f"the uninterrupted run failed: {program.output}")
    texts = [
        {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in rows}
        for rows in (results, results_in(reference))
        if not found.wrong
    ]
    if texts and texts[0] != texts[1]:
        found.wrong.append("the texts differ from those of an uninterrupted run")
    return found


def kill_engine(server: Server) -> None:
    family = descendants_of(server.process.pid)
    os.kill(next(pid for pid, line in family if "-m engine_core" in line), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=3, help="how often the run is killed")
    parser.add_argument("--engine-kills", type=int, default=1, help="how often the engine is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limit = ("--restart", "--restart-limit", str(options.engine_kills + 1))
        with Server(*limit, model=str(write_roomy_llama(folder))) as server:
            engine_kills = [partial(kill_engine, server)] * options.engine_kills
            found = killed_run(server.url, folder, options.lines, options.kills, engine_kills)
    print(f"{options.lines} lines in {found.seconds:.1f} s; killed at {found.kills} results")
    print("\n".join(found.wrong) or "each line was answered exactly once")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
