"""The engine client of a server without an engine (--render-only).

The model card comes from a file, and every request that needs an engine is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gateway.engine.client import ClientLine
from protocol.errors import NoEngine, ServingError
from protocol.messages import Limits
from protocol.model_card import ModelCard, read_card
from protocol.stats import EngineStats


def limits_without_engine(max_len: int) -> Limits:
    return Limits(
        max_len=max_len,
        max_slots=0,
        block_tokens=0,
        num_blocks=0,
        token_budget=0,
        prefix_cache=False,
    )


class NullEngineClient:
    """See `EngineClient`. The constructor raises ValueError if the file cannot be read."""

    def __init__(self, path: str) -> None:
        content = read_card(path)
        self.model: ModelCard = content.card
        self.limits = limits_without_engine(content.max_len)
        self.epoch: str | None = None
        self.silence_s: float | None = None
        self.stats: EngineStats | None = None
        self.is_ready = False
        self.lines: list[ClientLine] = []

    def start(self) -> None:
        """Do nothing: there is no engine."""

    def close(self) -> None:
        """Do nothing: there is no engine."""

    def trouble(self) -> ServingError | None:
        return None

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise NoEngine(
            "this server has no engine (--render-only); it only renders, derenders and tokenizes"
        )

    def abort_named(self, names: Sequence[str]) -> NoReturn:
        self.generate()

    def abort(self, request: int, on_freed: Callable[[], None] | None = None) -> None:
        """Do nothing: no request is ever open."""
