"""`EnginePool`: engines with the same role, one of which is chosen for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.engine.client import ZmqEngineClient
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import EngineNotReady, ServingError


class EnginePool:
    """One or more engines with the same role, in the order of the operator's options.

    role  "prefill" or "decode". Errors for clients name the role, because addresses are not public
    """

    def __init__(self, role: str, engines: Sequence[ZmqEngineClient]) -> None:
        self.role = role
        self.engines = engines

    @property
    def is_ready(self) -> bool:
        return any(engine.is_ready for engine in self.engines)

    @property
    def first(self) -> ZmqEngineClient:
        """The first engine that is ready, or the first one if none is. The pool reports this
        engine's model, limits and state as its own."""
        return next((engine for engine in self.engines if engine.is_ready), self.engines[0])

    def choose(
        self, model: ModelCard | None, load: Callable[[ZmqEngineClient], int]
    ) -> ZmqEngineClient:
        """Return the least loaded of the ready engines with this model. If there is none, raise the
        trouble of the first engine that has one, or EngineNotReady if all have another model.

        load   returns the load of an engine
        """
        usable = [engine for engine in self.engines if _serves(engine, model)]
        if len(usable) > 1:
            return min(usable, key=load)
        if usable:
            return usable[0]
        raise self._unavailable()

    def _unavailable(self) -> ServingError:
        """Return the error for a pool without a usable engine."""
        for engine in self.engines:
            if (trouble := engine.trouble()) is not None:
                return type(trouble)(f"the {self.role} engine: {trouble.message}")
        return EngineNotReady(f"the {self.role} engine has another model")


def _serves(engine: ZmqEngineClient, model: ModelCard | None) -> bool:
    own = engine.model
    if not engine.is_ready or own is None or model is None:
        return False
    return own is model or own.digest == model.digest
