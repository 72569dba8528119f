"""`tidegate replay`: replays the journal of an engine, in a child process."""

from __future__ import annotations

import argparse
import subprocess

from tools.processes.children import module_command

DESCRIPTION = """\
Replay the journal of an engine (`tidegate serve --journal DIRECTORY`) in this version, without a
worker, and compare all decisions with the journal. If a decision differs, the command prints the
first difference and exits with code 1. If there is no journal, it exits with code 2. If PATH is a
directory, all its journals are replayed, oldest first.
"""

EXAMPLES = """\
examples:
  tidegate serve --journal /var/tmp/journals
  tidegate replay /var/tmp/journals     all journals in the directory
  tidegate replay /var/tmp/journals/engine-20260102-030405-77-0001.journal
  tidegate replay PATH --check          also check all invariants of slots and blocks (slow)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a journal, or a directory of journals")
    parser.add_argument(
        "--check", action="store_true", help="check the engine's invariants after each record"
    )


def run(options: argparse.Namespace) -> int:
    command = module_command("engine_core.journal", options.path)
    return subprocess.run([*command, *["--check"] * options.check]).returncode
