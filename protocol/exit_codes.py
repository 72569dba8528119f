"""How our processes leave: one table of exit codes for all of them (docs/operations.md).

A process that was ended by a signal from outside has the code that shells give it: 128 and the
signal's number.
"""

from __future__ import annotations

from enum import IntEnum

KILLED = 128
"""and the number of the signal"""

DRAINED = "drained, "
"""How an engine's last line begins that has left with OK; who asked it to comes behind."""


class ExitCode(IntEnum):
    OK = 0  # stopped as asked, by whomever: drained, or had nothing to finish
    FAILED = 1  # none of those below; the last line says what
    USAGE = 2  # options that are wrong: they contradict each other, or name no such file or form
    WORKER_LOST = 3  # the worker was killed or stopped, fell silent, or failed
    OUT_OF_MEMORY = 4  # it ran out, on the device or in this container, while loading or later
    BAD_MODEL = 5  # the model is not there, is no model, is not supported, or can never fit here
    IN_USE = 6  # the port, the address or the device is another's, or not of this machine
    GATEWAY_LOST = 7  # the gateway ended by itself
    ENGINE_LOST = 8  # the engine ended by itself, and its worker had not failed
    NOT_READY = 9  # it did not become ready in the time that it was given
    NO_DOWNLOAD = 10  # the model could not be fetched or kept: the network, the index, the disk
