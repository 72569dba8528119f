"""Runs the property tests with more random examples than `make test`: random cuts of answers, long
storms of requests, and requests from the OpenAPI document.

    python -m tests.torture.examples [-k stop]

Arguments go to pytest. The command exits with pytest's exit code. `make torture` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.stages import PYTEST
from tests.support.examples import MORE, VARIABLE

OTHER_TESTS = (
    "tests/e2e/test_openapi.py",
    "tests/unit/test_triton_attention.py",
    "tests/unit/test_triton_step.py",
)
"""Tests outside of tests/property that draw random examples too."""
OPTIONS = ("--numprocesses", "auto", "--timeout", "1800", "tests/property", *OTHER_TESTS)


def main(arguments: list[str]) -> int:
    environment = {**os.environ, VARIABLE: MORE}
    return subprocess.run([*PYTEST, *OPTIONS, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
