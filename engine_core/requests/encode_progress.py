"""The inputs of a request that encodes, and its results so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.wire.arrays import Float32


@dataclass(slots=True)
class EncodeProgress:
    """The inputs of a request, and the results so far."""

    #: Number of tokens of each input.
    lengths: list[int]
    #: Token types, as in `EncodeInputs`.
    splits: list[int] | None
    #: Number of leading inputs that are in plans.
    num_planned: int = 0
    #: Number of inputs whose results have come.
    num_done: int = 0
    #: The results so far, one buffer of float32 for each step.
    results: list[bytes] = field(default_factory=list)

    @property
    def is_planned(self) -> bool:
        """Whether every input is in a plan."""
        return self.num_planned == len(self.lengths)

    @property
    def num_result_bytes(self) -> int:
        return sum(map(len, self.results))

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self.lengths)

    def vectors(self) -> Float32:
        """Return all results, [number of inputs, size]."""
        data = b"".join(self.results)
        size = len(data) // Float32.itemsize // len(self.lengths)
        return Float32(data, (len(self.lengths), size))
