"""Checks every Triton kernel on the device: the unit tests of the kernels, which interpret them on
a CPU, run with compiled kernels (tests/support/triton_device.py).

In float32, attention and layers equal exact numbers. In bfloat16, layers have the roundings of
torch. Sampled tokens and filters have the bits of torch on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from xml.etree import ElementTree

from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, checked
from tests.support.processes import ROOT
from tests.support.triton_device import DEVICE

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


def check_layers(session: GpuSession) -> Iterator[GpuRow]:
    yield _run(session, "layers")


def check_attention(session: GpuSession) -> Iterator[GpuRow]:
    yield _run(session, "attention")


def check_sampling(session: GpuSession) -> Iterator[GpuRow]:
    for part in ("sampling", "step"):
        yield _run(session, part)


def _run(session: GpuSession, part: str) -> GpuRow:
    """Run the file of tests of one part of the kernels."""
    report = session.folder / f"kernels-{part}.xml"
    words = session.choose("", f"{REHEARSED[part]} and ") + f"not ({LEFT_OUT})"
    command = [
        *(sys.executable, "-m", "pytest", "-q", f"tests/unit/test_triton_{part}.py"),
        *("-k", words, "-m", "not interpreted", "-o", "filterwarnings=", "-p", "no:cacheprovider"),
        *("--numprocesses", session.choose("8", "0"), f"--junitxml={report}"),
    ]
    environment = {**os.environ, DEVICE: str(session.device)}
    subprocess.run(command, cwd=ROOT, env=environment)  # the report has the result
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, skipped, failures = (
        int(suite.attrib[name]) for name in ("tests", "skipped", "failures")
    )
    failures += int(suite.attrib["errors"])
    broken = [
        case.attrib["name"] for case in suite.iter("testcase") if case.find("failure") is not None
    ]
    text = f"{total - skipped - failures} of {total - skipped} tests passed"
    text += f"; failed: {', '.join(broken[:3])}" if broken else ""
    return checked(part, text, is_right=failures == 0 and total > skipped)
