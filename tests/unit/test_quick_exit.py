"""A process that ends quickly still runs its exit functions and writes out what it has printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """if True:
    import atexit, sys, threading
    from protocol.process.quick_exit import quick_exit

    class Freed:
        def __del__(self, say=sys.stderr.write):
            say("freed\\n")

    freed = Freed()
    main = threading.main_thread()
    thread = threading.Thread(target=lambda: (main.join(), print("the thread")))
    thread.daemon = THREAD == "daemon"
    if THREAD:
        thread.start()
    atexit.register(lambda: sys.stderr.write("the exit function\\n"))
    print("the last line", end="")
    quick_exit(7)
    """


def ended(thread: str) -> subprocess.CompletedProcess[str]:
    code = CODE.replace("THREAD", repr(thread))
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 7, ran.stderr
    return ran


@pytest.mark.parametrize("thread", ["", "daemon"])
def test_exit_functions_run_and_output_is_written_but_no_object_is_freed(thread: str) -> None:
    ran = ended(thread)
    assert ran.stdout == "the last line"
    assert ran.stderr == "the exit function\n"


def test_a_process_waits_for_its_threads() -> None:
    ran = ended("waits")
    assert ran.stdout == "the last linethe thread\n"
    assert "freed" in ran.stderr


def test_a_process_without_a_reader_of_its_output_ends_with_its_code() -> None:
    code = "from protocol.process.quick_exit import quick_exit; print('x'); quick_exit(3)"
    command = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        process.stdout.close()
    assert process.returncode == 3


@pytest.mark.parametrize(("code", "seen"), [(0, 120), (3, 3)])
def test_output_that_cannot_be_written_is_a_failure(code: int, seen: int) -> None:
    program = f"from protocol.process.quick_exit import quick_exit; print('x'); quick_exit({code})"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-P", "-c", program], stdout=full, env=environment)
    assert ran.returncode == seen
