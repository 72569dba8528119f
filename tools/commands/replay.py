"""`tidegate replay`: replays the journal of an engine, in a child process."""

from __future__ import annotations

import argparse
import subprocess

from tools.processes.child_environment import child_environment
from tools.processes.children import module_command

DESCRIPTION = """\
Replay the journal of an engine (`tidegate serve --journal DIRECTORY`) in this version, without a
worker, and compare all decisions with the journal. If a decision differs, the command prints the
first difference and exits with code 1. If there is no journal, it exits with code 2. If PATH is a
directory, all its journals are replayed, oldest first.

With --weights, a worker computes all steps again, with the model and the options of the journal,
and its tokens and logprobs are compared with the recorded ones, bit by bit.
"""

EXAMPLES = """\
examples:
  tidegate serve --journal /var/tmp/journals
  tidegate replay /var/tmp/journals     all journals in the directory
  tidegate replay /var/tmp/journals/engine-20260102-030405-77-0001.journal
  tidegate replay PATH --check          also check all invariants of slots and blocks (slow)
  tidegate replay PATH --weights        also compute all tokens again, and compare them
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a journal, or a directory of journals")
    parser.add_argument(
        "--check", action="store_true", help="check the engine's invariants after each record"
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="also compute the steps with the journal's model, and compare tokens and logprobs",
    )
    parser.add_argument(
        "--any-fingerprint",
        action="store_true",
        help="with --weights: compare even if this machine's kernels, C library or dtype are not "
        "those of the journal, so that tokens can differ",
    )


def run(options: argparse.Namespace) -> int:
    flags = ("check", "weights", "any_fingerprint")
    given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(options, flag)]
    command = module_command("engine_core.journal", options.path)
    return subprocess.run([*command, *given], env=child_environment()).returncode
