"""Runs stages, each in a process of its own, so that one that crashes or hangs ends no other.

The processes are forks of a server that has imported torch, which takes seconds, but has not
touched the GPU.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, NotPossible, failed, not_run

OUR_PACKAGES = ("protocol", "gateway", "engine_core", "worker", "tools", "simulator", "tests")
CLOSE_S = 5.0
"""Longest wait for the end of a process that has sent its rows."""


@dataclass(frozen=True, kw_only=True)
class GpuStage:
    """A part of a run: a function that takes the session and yields rows."""

    name: str
    #: "module:function", of this package.
    function: str
    #: Most seconds that the stage may take.
    limit_s: float

    def load(self) -> Callable[[GpuSession], Iterator[GpuRow]]:
        module, _, name = self.function.partition(":")
        found: Callable[[GpuSession], Iterator[GpuRow]] = getattr(import_module(module), name)
        return found


def run_stage(stage: GpuStage, session: GpuSession, limit_s: float) -> Iterator[GpuRow]:
    """Run a stage, and yield its rows as they arrive. If it fails, lacks something or takes longer
    than `limit_s`, the last row says so. Its output goes to a file of the session's folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    receiver, sender = context.Pipe(duplex=False)
    log = session.folder / f"{stage.name.replace(' ', '-')}.log"
    process = context.Process(target=_main, args=(stage, session, log, sender))
    process.start()
    sender.close()
    assert process.pid is not None
    deadline = time.monotonic() + limit_s
    try:
        while (left := deadline - time.monotonic()) > 0 and receiver.poll(left):
            row = msgspec.json.decode(receiver.recv_bytes(), type=GpuRow)
            yield msgspec.structs.replace(row, stage=stage.name)
        why = f"it took longer than {limit_s:.0f} s"
    except EOFError:  # it has ended, or is about to
        process.join(CLOSE_S)
        why = "" if process.exitcode == 0 else f"it ended with code {process.exitcode}; see {log}"
    finally:
        _kill(process.pid)
        process.join()
    if why:
        yield msgspec.structs.replace(failed("the stage", why), stage=stage.name)


def _main(stage: GpuStage, session: GpuSession, log: Path, sender: Connection) -> None:
    """Run a stage in this process, with its output in `log`. Send its rows."""
    os.setsid()  # so that its own children can be killed with it
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def send(row: GpuRow) -> None:
        print(row, file=sys.stderr, flush=True)
        sender.send_bytes(msgspec.json.encode(row))

    try:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
        session.set_threads()
        for row in stage.load()(session):
            send(row)
    except NotPossible as error:
        send(not_run("the stage", str(error)))
    except Exception as error:  # whatever it is, it belongs into the table
        traceback.print_exc()
        send(_row_of(error))
    sender.close()


def _row_of(error: Exception) -> GpuRow:
    """Return the row for an error that ended a stage."""
    name = getattr(error, "name", None) or ""
    if isinstance(error, ModuleNotFoundError) and name.partition(".")[0] not in OUR_PACKAGES:
        return not_run("the stage", f"{name} is not installed")
    message = (str(error).strip() or "no message").splitlines()[0]
    return failed("the stage", f"{type(error).__name__}: {message}")


def _kill(pid: int) -> None:
    """Kill the processes of a stage, if there are any left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended, or it was too young to lead a group
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
