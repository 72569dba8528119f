"""The programs about ARM say what is missing, and find the loop whose cycles are estimated."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.benchmarks.instruction_costs import loop_of, products
from tests.torture import arm, arm_server
from worker.kernels.instruction_sets import sets_of

CODE = """tile:
\tmov\tx3, 0
.L2:
\tldr\tq1, [x1], 16
\tsdot\tv0.4s, v1.16b, v2.4b[0]
\tsdot\tv3.4s, v1.16b, v2.4b[1]
\tsubs\tx0, x0, 1
\tbne\t.L2
.L3:
\tsmmla\tv4.4s, v5.16b, v6.16b
\tcbnz\tx2, .L3
\tb\t.L4
.L4:
\tret
"""


def test_the_loop_with_the_most_products_is_found() -> None:
    loop = loop_of(CODE)
    assert (loop[0], loop[-1]) == (".L2:", "\tbne\t.L2")
    assert products(loop) == 32
    assert products(CODE.splitlines()) == 64


def test_code_without_such_a_loop_is_an_error() -> None:
    with pytest.raises(ValueError, match="no loop with products"):
        loop_of("tile:\n\tsdot\tv0.4s, v1.16b, v2.16b\n\tret\n")


def test_an_old_emulator_is_told_from_a_new_one() -> None:
    old = arm.qemu_version("qemu-aarch64 version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright")
    assert old < arm.LEAST_QEMU <= arm.qemu_version("qemu-aarch64 version 10.0.13 (Debian)")
    assert arm.qemu_version("sh: not found") < arm.LEAST_QEMU


@pytest.mark.parametrize("main", [arm.main, arm_server.main])
def test_without_an_emulator_programs_are_skipped_in_words(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--qemu", "no-such-emulator"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("skipped: ")
    assert printed.endswith(" is not installed\n")


def test_the_launcher_is_the_name_by_which_python_starts_others(tmp_path: Path) -> None:
    root = tmp_path / "a root"
    (root / "usr/bin").mkdir(parents=True)
    launcher = arm.ArmSystem(root, "echo").launcher("max")

    printed = subprocess.run([launcher, "-c", "a word"], capture_output=True, text=True).stdout
    python = root / "usr/bin/python3"
    assert printed == f"-cpu max -L {root} -0 {launcher} {python} -c a word\n"


def test_every_set_of_arm_has_a_processor_to_emulate() -> None:
    assert set(arm.EMULATED) == {each.name for each in sets_of(arm.MACHINE)}
    with pytest.raises(SystemExit):
        arm.main(["--sets", "neon,avx2"])
