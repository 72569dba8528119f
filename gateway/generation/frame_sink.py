"""The base of the sinks that write an answer to a stream, as the frames of one API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from gateway.formats.events import OutputDelta
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.http.errors import HTTPFault, fault_of
from protocol.wire.errors import ServingError


class FrameDestination(Protocol):
    """Receives the frames of a stream: `write` for each, then `finish`."""

    def write(self, data: bytes) -> None: ...
    @property
    def finish(self) -> Callable[[], None]: ...


class FrameSink(ABC):
    """A sink that writes one answer as frames. A subclass makes the frames of its API.

    group        the choices of the answer
    destination  receives the frames, one or more at a time
    """

    def __init__(self, group: ChoiceGroup, destination: FrameDestination) -> None:
        self._group = group
        self._write, self._finish = destination.write, destination.finish

    @abstractmethod
    def frames(self, choice: Choice, delta: OutputDelta) -> bytes:
        """Return the frames of `delta`; b"" if it has nothing to send."""

    @abstractmethod
    def closing(self) -> bytes:
        """Return the last frames of a complete answer."""

    @abstractmethod
    def failed(self, fault: HTTPFault) -> bytes:
        """Return the last frames of an answer that ends with the error `fault`."""

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        if frames := self.frames(choice, delta):
            self._write(frames)

    def end(self) -> None:
        self._write(self.closing())
        self._finish()

    def fail(self, error: ServingError) -> None:
        self._write(self.failed(fault_of(error)))
        self._finish()
