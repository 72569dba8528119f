"""Replay a journal and summarise it: `python -P -m engine_core.journal PATH`.

PATH is a file, or a directory as `--journal` takes it, whose files are replayed one by one.

Exit codes: 0 if all decisions are the same; 1 if one differs; 2 if a file is not a journal, or
there is none.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from engine_core.journal.file import SUFFIX, journals_in, read
from engine_core.journal.replay import NoJournal, ReplayDiffers, ReplayReport, replay
from protocol.errors import WireError

SAME, DIFFERS, NO_JOURNAL = 0, 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="tidegate replay")
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.path.is_dir():
        return replay_file(options.path, checks=options.check)
    files = journals_in(options.path)
    if not files:
        print(f"tidegate: {options.path} holds no journal (*{SUFFIX})", file=sys.stderr)
        return NO_JOURNAL
    codes = set()
    for file in files:
        print(file.name, flush=True)
        codes.add(replay_file(file, checks=options.check))
        print(flush=True)
    return next(code for code in (DIFFERS, NO_JOURNAL, SAME) if code in codes)


def replay_file(file: Path, *, checks: bool) -> int:
    """Replay one journal, print the outcome, and return the exit code."""
    began = time.monotonic()
    try:
        report = replay(read(file), checks=checks)
    except ReplayDiffers as error:
        print(f"the replay differs: {error}")
        return DIFFERS
    except (NoJournal, WireError, OSError) as error:
        print(f"tidegate: {file}: {error}", file=sys.stderr)
        return NO_JOURNAL
    except Exception:  # raised by the engine: often the failure being investigated
        traceback.print_exc()
        print("the engine failed, as it may have when recorded: see the traceback")
        return DIFFERS
    print(summary(report))
    print(f"\nreplayed in {time.monotonic() - began:.1f} s: all decisions are the same")
    return SAME


def summary(report: ReplayReport) -> str:
    stats, began = report.stats, report.began
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(began.at))
    ends = ", ".join(f"{why} {number}" for why, number in sorted(stats.num_finished.items()))
    full = "\nended    early: the file was full" if report.is_full else ""
    part = f"part {began.part} of its life, " if began.part > 1 else ""
    return f"""\
engine   of {when} UTC, tidegate {began.version}
model    {began.model.name} ({began.model.dtype}), {began.limits.num_blocks} blocks
journal  {part}{report.num_records:,} records of {report.seconds:,.1f} s
requests {stats.num_accepted:,} accepted, {stats.num_refused:,} refused; ended: {ends or "none"}
open     {stats.running} running, {stats.waiting} waiting at its end
steps    {stats.num_steps:,}, {stats.num_preemptions:,} preemptions
tokens   {stats.num_prompt_tokens:,} of prompts ({stats.num_cached_tokens:,} cached), \
{stats.num_generated_tokens:,} of answers{full}"""


if __name__ == "__main__":
    sys.exit(main())
