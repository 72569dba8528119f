"""What the next steps do, recorded by torch's profiler and written as a Chrome trace.

Recording begins with the first plan after the order, so that waiting for one costs nothing, and
ends when the last of the steps has been told, or when the engine says so. Recording makes steps
slower, and writing takes seconds, in which the worker does nothing else.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from protocol.steps import Trace, Traced


@dataclass(slots=True)
class TraceRecording:
    """first  the number of its first step;  num_told  how many of its steps have been told"""

    profiler: profile
    first: int
    began: float
    num_told: int = 0


class Tracer:
    """One trace at a time; the engine asks for no second one before it has heard of the first."""

    def __init__(self) -> None:
        self._order: Trace | None = None
        self._recording: TraceRecording | None = None
        self._traced: Traced | None = None

    def obey(self, order: Trace) -> None:
        """Begin with the next plan; or, with 0 steps, end what has begun."""
        if order.steps == 0:
            self._end()
            return
        self._order = order
        try:
            check_directory(Path(order.directory))
        except OSError as error:
            self._finish(Traced(error=str(error)))

    def before(self, step: int) -> None:
        """Call before a step is launched."""
        if self._order is None or self._recording is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        profiler.start()
        self._recording = TraceRecording(profiler, step, time.time())

    def after(self, step: int) -> None:
        """Call when a step has been told."""
        recording, order = self._recording, self._order
        if recording is None or order is None or step < recording.first:
            return
        recording.num_told += 1
        if recording.num_told == order.steps:
            self._end()

    def take(self) -> Traced | None:
        """What there is to tell, once."""
        traced, self._traced = self._traced, None
        return traced

    def _end(self) -> None:
        recording, order = self._recording, self._order
        if order is None:
            return  # it has ended by itself; that is being told
        if recording is None:
            self._finish(Traced(error="no step came"))
            return
        ended = time.time()
        recording.profiler.stop()
        try:
            file = _write(recording, Path(order.directory))
        except OSError as error:
            self._finish(Traced(error=str(error)))
            return
        self._finish(
            Traced(file=str(file), steps=recording.num_told, began=recording.began, ended=ended)
        )

    def _finish(self, traced: Traced) -> None:
        self._order = self._recording = None
        self._traced = traced


def check_directory(directory: Path) -> None:
    """Make it, if it is not there. Raises OSError where anybody but us may enter it: a trace tells
    what the server does."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory that only its owner can enter")


def _write(recording: TraceRecording, directory: Path) -> Path:
    """Under a name of its own, for its owner alone. Compressed: it is megabytes a step."""
    check_directory(directory)
    file = directory / f"worker-{os.getpid()}-step-{recording.first}.json.gz"
    recording.profiler.export_chrome_trace(str(file))
    file.chmod(0o600)
    return file
