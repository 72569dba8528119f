"""The output of a request that encodes: the engine sends all results in its last output."""

from __future__ import annotations

from gateway.formats.events import Failed, Finished, OutputDelta
from protocol.engine.messages import Output
from protocol.wire.arrays import Float32
from protocol.wire.errors import ErrorInfo

_UNEXPLAINED = ErrorInfo(code="engine_error", message="the engine failed without giving a reason")


class VectorParser:
    """Stores the vectors or scores in the output of one encoding request. It is an `OutputParser`
    and its own factory, because such a request has one choice.

    vectors   the results; None until the request has ended with "stop"
    """

    may_stop = False

    def __init__(self) -> None:
        self.vectors: Float32 | None = None

    def new(self) -> VectorParser:
        return self

    def push(self, output: Output) -> OutputDelta:
        if output.finish is None:
            return OutputDelta()
        if output.finish == "error":
            return OutputDelta(events=[Failed(output.error or _UNEXPLAINED)])
        self.vectors = output.vectors
        return OutputDelta(events=[Finished(output.finish)])
