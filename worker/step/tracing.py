"""Records the next steps with torch's profiler, and writes a Chrome trace.

Recording starts with the first plan after the request, so idle time is not recorded. It ends when
the result of the last step has been sent, or when the engine stops it. Recording makes steps
slower. Writing takes seconds, in which the worker does nothing else.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from protocol.worker.steps import Trace, Traced

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass(slots=True)
class TraceRecording:
    """A recording in progress: its profiler, its first step, its start (time.time), and how many of
    its steps were reported."""

    profiler: profile
    first: int
    started: float
    num_reported: int = 0


class Tracer:
    """Records one trace at a time. The engine requests no second trace before the first is done."""

    def __init__(self) -> None:
        self._request: Trace | None = None
        self._recording: TraceRecording | None = None
        self._traced: Traced | None = None

    def on_trace(self, request: Trace) -> None:
        """Record from the next plan on. A request for 0 steps ends the current recording."""
        if request.steps == 0:
            self._end()
            return
        self._request = request
        try:
            check_directory(Path(request.directory))
        except OSError as error:
            self._finish(Traced(error=str(error)))

    def before_step(self, step: int) -> None:
        """Start the requested recording, if it has not started. Call this before each launch."""
        if self._request is None or self._recording is not None:
            return
        from torch.profiler import ProfilerActivity, profile  # postponed: device/postponed.py

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        profiler.start()
        self._recording = TraceRecording(profiler, step, time.time())

    def after_step(self, step: int) -> None:
        """Count a step, and end the recording after its last one. Call this after each result was
        sent."""
        recording, request = self._recording, self._request
        if recording is None or request is None or step < recording.first:
            return
        recording.num_reported += 1
        if recording.num_reported == request.steps:
            self._end()

    def pop(self) -> Traced | None:
        """Return the result of a recording that has finished since the last call; None if there is
        none."""
        traced, self._traced = self._traced, None
        return traced

    def _end(self) -> None:
        recording, request = self._recording, self._request
        if request is None:
            return  # the recording has ended already; `pop` returns its result
        if recording is None:
            self._finish(Traced(error="no step was computed"))
            return
        ended = time.time()
        recording.profiler.stop()
        try:
            file = _write(recording, Path(request.directory))
        except OSError as error:
            self._finish(Traced(error=str(error)))
            return
        self._finish(
            Traced(
                file=str(file),
                steps=recording.num_reported,
                began=recording.started,
                ended=ended,
            )
        )

    def _finish(self, traced: Traced) -> None:
        self._request = self._recording = None
        self._traced = traced


def check_directory(directory: Path) -> None:
    """Create the directory if necessary. Raises OSError if anybody except its owner can enter it,
    because a trace shows what the server does."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory that only its owner can enter")


def _write(recording: TraceRecording, directory: Path) -> Path:
    """Write the trace to a new file that only the owner can read. The file is compressed, because a
    step takes megabytes."""
    check_directory(directory)
    file = directory / f"worker-{os.getpid()}-step-{recording.first}.json.gz"
    recording.profiler.export_chrome_trace(str(file))
    file.chmod(0o600)
    return file
