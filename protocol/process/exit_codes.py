"""Exit codes of all Tidegate processes (docs/operate/health.md).

A process that was killed by a signal is reported with the exit code that shells use: 128 plus the
number of the signal.
"""

from __future__ import annotations

from enum import IntEnum

KILLED = 128
"""The exit code of a process that a signal has killed is KILLED + the number of the signal."""

DRAINED = "drained, "
"""Start of the last log line of an engine that was drained. The cause of the drain follows."""


class ExitCode(IntEnum):
    OK = 0  # stopped on request, after finishing its requests
    FAILED = 1  # none of the causes below; the last line of output gives the cause
    USAGE = 2  # wrong options: a bad value, a missing file, or options that contradict each other
    WORKER_LOST = 3  # the worker was killed or stopped, went silent, or failed
    OUT_OF_MEMORY = 4  # on the device or in this container, while loading or later
    BAD_MODEL = 5  # the model is missing, invalid, unsupported, or can never fit here
    IN_USE = 6  # the port, address or device is in use, or does not belong to this machine
    GATEWAY_LOST = 7  # the gateway ended unexpectedly
    ENGINE_LOST = 8  # the engine ended unexpectedly, without a failure of its worker
    NOT_READY = 9  # not ready within --start-timeout-s
    NO_DOWNLOAD = 10  # the model could not be downloaded or stored: network, index or disk
