"""`python -m tests.gpu [--out FOLDER] [--rehearse]`: check and time everything on a GPU.

Needs an NVIDIA GPU, torch for CUDA and the extra `test`, and no network. Takes at most ten minutes.
Writes the table to FOLDER/gpu.md, all figures to FOLDER/gpu.json, and the output of each stage to a
.log file. The table is written after each stage, so a run that is killed leaves what it has.

Exit codes: 0 if no check failed, whether or not all goals are met; 1 if a check or a stage failed;
2 if there is no GPU, or for a bad command line.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.gpu.facts import run_facts
from tests.gpu.processes import GpuStage, run_stage
from tests.gpu.session import GpuSession
from tests.gpu.stages import STAGES
from tests.gpu.table import GpuRow, markdown, not_run

LIMIT_S = 570.0
"""Most seconds of all stages together, so that a command limited to ten minutes ends by itself."""
REHEARSED = "Rehearsal on a CPU: the figures mean nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    session = GpuSession(options.out.absolute(), options.rehearse)
    if not session.is_rehearsal and not has_gpu():
        print("there is no NVIDIA GPU here; --rehearse runs the stages without one")
        return 2
    chosen = [stage for stage in STAGES if options.only in stage.name]
    try:
        rows = run_all(chosen, session, limit_s=options.limit_s)
    finally:
        shutil.rmtree(session.models, ignore_errors=True)
    print(f"\n{session.folder / 'gpu.md'}: {_summary(rows)}")
    return int(any(row.outcome == "failed" for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-run"), metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="WORDS", help="stages whose name has WORDS")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="limit of all stages")
    parser.add_argument(
        "--rehearse", action="store_true", help="run all stages with tiny sizes, without a GPU"
    )
    return parser


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU. This process must not use it: a stage that
    crashes could not be followed by another one."""
    return any(Path("/dev").glob("nvidia*"))


def run_all(
    stages: Sequence[GpuStage], session: GpuSession, *, limit_s: float = LIMIT_S
) -> list[GpuRow]:
    """Run the stages in order, print their rows, and write the table after each."""
    facts, rows, started = run_facts(), [], time.monotonic()
    for stage in stages:
        left = limit_s - (time.monotonic() - started)
        print(f"== {stage.name} (at {time.monotonic() - started:.0f} s)", flush=True)
        if left <= 0:
            late = not_run("the stage", f"the run has taken {limit_s:.0f} s")
            rows.append(msgspec.structs.replace(late, stage=stage.name))
        else:
            for row in run_stage(stage, session, min(stage.limit_s, left)):
                print("  ", row.outcome, row.name, row.text, row.goal, sep="  ", flush=True)
                rows.append(row)
        facts["seconds"] = f"{time.monotonic() - started:.0f}"
        _write(session, facts, rows)
    return rows


def _write(session: GpuSession, facts: dict[str, str], rows: Sequence[GpuRow]) -> None:
    title = REHEARSED if session.is_rehearsal else f"Tidegate on {facts['GPU'].partition(',')[0]}"
    (session.folder / "gpu.md").write_text(markdown(facts, rows, title=title))
    content = msgspec.json.encode({"facts": facts, "rows": rows})
    (session.folder / "gpu.json").write_bytes(msgspec.json.format(content))


def _summary(rows: Sequence[GpuRow]) -> str:
    counts = {row.outcome: 0 for row in rows}
    for row in rows:
        counts[row.outcome] += 1
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
