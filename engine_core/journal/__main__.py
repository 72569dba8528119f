"""Replay a journal and print a summary: `python -P -m engine_core.journal PATH`.

PATH is a journal file, or a directory of journals (the engine's option `--journal`). The files of a
directory are replayed one by one. With `--weights`, a worker computes the steps again.

The exit code is 0 if all replies (with `--weights`, also all tokens and logprobs) are the same. It
is 1 if one differs, or if the engine raises an exception. It is 2 if a file cannot be read or is
not a journal, if the directory has none, or if the worker cannot compute the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from pathlib import Path

from engine_core.journal.file import SUFFIX, list_journals, read
from engine_core.journal.replay import NoJournal, ReplayDiffers, ReplayReport, replay
from engine_core.journal.weights import NotComparable, ReplayWorker
from engine_core.workers.process import WorkerLost
from protocol.wire.errors import WireError

SAME, DIFFERS, NO_JOURNAL = 0, 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="tidegate replay")
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--any-fingerprint", action="store_true")
    options = parser.parse_args()
    is_directory = options.path.is_dir()
    files = list_journals(options.path) if is_directory else [options.path]
    if not files:
        print(f"tidegate: {options.path} contains no journal (*{SUFFIX})", file=sys.stderr)
        return NO_JOURNAL
    codes = set()
    worker = ReplayWorker(any_fingerprint=options.any_fingerprint) if options.weights else None
    with contextlib.nullcontext() if worker is None else contextlib.closing(worker):
        for file in files:
            if is_directory:
                print(file.name, flush=True)
            codes.add(replay_file(file, checks=options.check, worker=worker))
            if is_directory:
                print(flush=True)
    return next(code for code in (DIFFERS, NO_JOURNAL, SAME) if code in codes)


def replay_file(file: Path, *, checks: bool, worker: ReplayWorker | None = None) -> int:
    """Replay one journal, print its summary or the first difference, and return the exit code."""
    with contextlib.ExitStack() as unless_whole:
        if worker is not None:
            unless_whole.callback(worker.close)  # it lacks steps, so it cannot continue
        return _replay_file(file, unless_whole, checks=checks, worker=worker)


def _replay_file(
    file: Path, unless_whole: contextlib.ExitStack, *, checks: bool, worker: ReplayWorker | None
) -> int:
    """Replay a journal, and print the result, for `replay_file`. Remove the callbacks of
    `unless_whole` if all records were replayed and none is missing."""
    started_at = time.monotonic()
    try:
        report = replay(read(file), checks=checks, worker=worker)
    except ReplayDiffers as error:
        print(f"the replay differs: {error}")
        return DIFFERS
    except (NoJournal, NotComparable, WorkerLost, WireError, OSError) as error:
        print(f"tidegate: {file}: {error}", file=sys.stderr)
        return NO_JOURNAL
    except Exception:  # raised by the engine; it may be the failure that is being investigated
        traceback.print_exc()
        print("the engine raised an exception, as it may have done when it was recorded")
        return DIFFERS
    if not report.is_full:
        unless_whole.pop_all()
    print(summary(report))
    print(f"\nreplayed in {time.monotonic() - started_at:.1f} s: all decisions are the same")
    if worker is None:
        return SAME
    print(worker.comparison.summary())
    return SAME if worker.comparison.is_same else DIFFERS


def summary(report: ReplayReport) -> str:
    stats, start = report.stats, report.start
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(start.at))
    ends = ", ".join(f"{why} {number}" for why, number in sorted(stats.num_finished.items()))
    full = "\nended    early: the file was full" if report.is_full else ""
    part = f"file {start.part} of this engine, " if start.part > 1 else ""
    return f"""\
engine   of {when} UTC, tidegate {start.version}
model    {start.model.name} ({start.model.dtype}), {start.limits.num_blocks} blocks
journal  {part}{report.num_records:,} records of {report.seconds:,.1f} s
requests {stats.num_accepted:,} accepted, {stats.num_refused:,} refused; ended: {ends or "none"}
open     {stats.running} running, {stats.waiting} waiting at the end
steps    {stats.num_steps:,}, {stats.num_preemptions:,} preemptions
tokens   {stats.num_prompt_tokens:,} of prompts ({stats.num_cached_tokens:,} cached), \
{stats.num_generated_tokens:,} of answers{full}"""


if __name__ == "__main__":
    sys.exit(main())
