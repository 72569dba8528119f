"""Checks every Triton kernel on the device: the unit tests of the kernels, which interpret them on
a CPU, run with compiled kernels (tests/support/triton_device.py).

In float32, attention and layers equal exact numbers. In bfloat16, layers have the roundings of
torch. Sampled tokens and filters have the bits of torch on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, checked
from tests.support.processes import ROOT
from tests.support.triton_device import DEVICE

FAILED = ("failure", "error")
LEFT_OUT = "mistake or 2_to_the_31 or launch or installed or refused or no_triton or gpu_gets"
"""Tests that are of no use on a GPU: planted mistakes, whose kernels take long to compile, a file
of 4 GiB, and the host's part."""
REHEARSED = {
    "layers": "activations_are_right",
    "attention": "freed_blocks_outside",
    "sampling": "drafts_are_verified",
    "step": "scores_equal",
}
"""Words of the few tests that a rehearsal runs."""


def check_kernels(session: GpuSession) -> Iterator[GpuRow]:
    """Run the tests of all parts, several at a time, because kernels take long to compile."""
    report = session.folder / "kernels.xml"
    chosen = session.choose("", f"({' or '.join(REHEARSED.values())}) and ")
    command = [
        *(sys.executable, "-m", "pytest", "-q", *map(file_of, REHEARSED)),
        *("-k", f"{chosen}not ({LEFT_OUT})", "-m", "not interpreted", "-o", "filterwarnings="),
        *("-p", "no:cacheprovider", "--numprocesses", session.choose("8", "0")),
        f"--junitxml={report}",
    ]
    environment = {**os.environ, DEVICE: str(session.device)}
    subprocess.run(command, cwd=ROOT, env=environment)  # the report has the result
    cases = [*ElementTree.parse(report).iter("testcase")]
    for part in REHEARSED:
        yield row_of(
            part, [case for case in cases if f"test_triton_{part}" in case.attrib["classname"]]
        )


def file_of(part: str) -> str:
    """Return the file of tests of a part of the kernels."""
    return f"tests/unit/test_triton_{part}.py"


def row_of(part: str, cases: Sequence[ElementTree.Element]) -> GpuRow:
    """Return the result of a part's tests, which are elements of a report of pytest."""
    ran = [case for case in cases if case.find("skipped") is None]
    broken = [case for case in ran if any(case.find(kind) is not None for kind in FAILED)]
    text = f"{len(ran) - len(broken)} of {len(ran)} tests passed"
    if broken:
        text += f"; failed: {', '.join(case.attrib['name'] for case in broken[:3])}"
    return checked(part, text, is_right=bool(ran) and not broken)
