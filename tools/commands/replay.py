"""`tidegate replay`: what an engine with --journal went through, again. The work is the engine
room's: it is started as a program of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys

DESCRIPTION = """\
Give an engine's journal (`tidegate serve --journal DIRECTORY`) to an engine of this version,
without a worker, and compare its decisions with those in the journal. If one differs, name the
first difference and exit with code 1. Exit with code 2 if there is no journal. All journals of a
directory are replayed, oldest first.
"""

EXAMPLES = """\
examples:
  tidegate serve --journal /var/tmp/journals
  tidegate replay /var/tmp/journals     all journals in the directory
  tidegate replay /var/tmp/journals/engine-20260102-030405-77-0001.journal
  tidegate replay PATH --check          check every invariant of slots and blocks too: slow
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a journal, or the directory of --journal")
    parser.add_argument(
        "--check", action="store_true", help="check the engine's laws after each record"
    )


def run(options: argparse.Namespace) -> int:
    command = [sys.executable, "-P", "-m", "engine_core.journal", options.path]
    return subprocess.run([*command, *(["--check"] if options.check else [])]).returncode
