"""Runs the property tests with more random examples than `make test`: all random cuts of answers,
long storms, and the bits of more prompts.

    python -m tests.torture.examples [-k stop]

Arguments go to pytest. The command exits with pytest's exit code. `make torture` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.stages import PYTEST
from tests.support.examples import MORE, VARIABLE

BITS = "tests/differential/test_same_bits.py"
OPTIONS = ("--numprocesses", "auto", "--timeout", "1800", "tests/property", BITS)


def main(arguments: list[str]) -> int:
    environment = {**os.environ, VARIABLE: MORE}
    return subprocess.run([*PYTEST, *OPTIONS, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
