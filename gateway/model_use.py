"""One request's use of a model: the engine, the prepared model, and the adapter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gateway.engine.base import EngineClient, RoutedOptions
from gateway.served_model import ServedModel
from protocol.engine.adapters import AdapterInfo
from protocol.wire.errors import EngineNotReady, UnknownModel


def adapter_named(name: str, adapters: Iterable[AdapterInfo]) -> AdapterInfo | None:
    """Return the adapter that has this name; None if there is none."""
    return next((info for info in adapters if info.name == name), None)


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One request's use of a model, from its lookup to its end."""

    #: The client for the model's engines.
    engine: EngineClient
    #: The model at the time of the lookup. Another one may be prepared later, if the engine
    #: restarts.
    model: ServedModel
    #: Seconds that the request has waited for the model.
    waited_s: float = 0.0
    #: The LoRA adapter that the request uses; None: the model alone.
    adapter: AdapterInfo | None = None

    @property
    def adapter_options(self) -> RoutedOptions:
        """The options that name the adapter to the engine."""
        if self.adapter is None:
            return {}
        return {"adapter": self.adapter.name, "adapter_digest": self.adapter.digest}

    def with_current_adapter(self) -> ModelUse:
        """Return this use with the adapter that has the same name now. Raises UnknownModel if no
        adapter has it any more."""
        assert self.adapter is not None
        name = self.adapter.name
        if (current := adapter_named(name, self.engine.adapters)) is None:
            raise UnknownModel(
                f"the adapter {name!r} was unloaded while the request was sent", param="model"
            )
        return replace(self, adapter=current)

    def check(self) -> None:
        """Raise EngineNotReady if the engine has restarted with another model since the lookup,
        because a prompt that was prepared for this one may have other tokens there."""
        card = self.engine.model
        if card is not None and card.digest != self.model.card.digest:
            raise EngineNotReady(
                "the engine was restarted with another model while the request was prepared",
                retry_after_s=1,
            )
