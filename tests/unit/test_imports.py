"""Large modules are imported without pauses for the garbage collector."""

from __future__ import annotations

import subprocess
import sys

MANY = 100_000
"""More new objects than a collection waits for."""


def test_no_garbage_is_collected_during_imports_and_later_collections_skip_what_was_imported() -> (
    None
):
    code = f"""if True:
        import gc
        from protocol.process.imports import without_collections
        runs = []
        gc.callbacks.append(lambda phase, info: runs.append(phase))
        with without_collections():
            kept = [[] for _ in range({MANY})]
        assert not runs
        assert gc.isenabled()
        assert gc.get_freeze_count() > {MANY}
        others = [[] for _ in range({MANY})]
        assert runs
        """
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_collector_that_was_off_before_imports_stays_off() -> None:
    code = """if True:
        import gc
        from protocol.process.imports import without_collections
        gc.disable()
        with without_collections():
            pass
        assert not gc.isenabled()
        """
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_command_collects_no_garbage_of_the_modules_that_it_imports() -> None:
    code = """if True:
        import gc
        from tools.__main__ import build_parser
        assert not gc.get_freeze_count()
        build_parser("serve")
        assert gc.get_freeze_count() > 1000
        assert gc.isenabled()
        """
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
