"""The description of several streams of hidden states. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from worker.errors import UnusableModel

MAX_STREAMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """AltUp: a token has several streams of hidden states, and each layer computes one of them, the
    active one (layers/altup.py). The layer first predicts all streams from all streams. Then it
    computes the active one, and corrects all streams by what that changed.

    The first stream is the embedding of the token. What a layer makes of its per-layer inputs is
    added to all streams but the first.
    """

    streams: int
    active: int
    #: Whether the active stream is multiplied by a learned vector before the layer chooses among
    #: its per-layer inputs.
    scaled: bool

    @property
    def work_streams(self) -> int:
        """Return how many hidden states of a token are held at once: those of the streams, of their
        prediction, of the change, and of a product."""
        return 4 * self.streams

    def check(self) -> None:
        """Raise UnusableModel if there cannot be such streams."""
        if not 2 <= self.streams <= MAX_STREAMS:
            raise UnusableModel(
                f"the model has {self.streams} streams of hidden states; "
                f"2 to {MAX_STREAMS} are supported"
            )
        if not 0 <= self.active < self.streams:
            raise UnusableModel(
                f"stream {self.active} of {self.streams} streams of hidden states cannot be active"
            )
