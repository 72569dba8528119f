"""Loads and unloads LoRA adapters in all engines of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from gateway.engine.client import ZmqEngineClient
from protocol.adapters import AdapterInfo
from protocol.errors import EngineError, EngineNotReady, ServingError, UnknownModel


def load_in_all(engines: Sequence[ZmqEngineClient], name: str, path: str) -> AdapterInfo:
    """Load an adapter in all engines, one after another. If one of them cannot load it, unload it
    in the others and raise that engine's error. Raises EngineNotReady if there are no engines, and
    EngineError if the engines have read different files."""
    _check(engines)
    loaded: list[ZmqEngineClient] = []
    try:
        infos = []
        for engine in engines:
            infos.append(engine.load_adapter(name, path))
            loaded.append(engine)
        if len({info.digest for info in infos}) > 1:
            raise EngineError(f"the engines have read different adapters at {path!r:.200}")
    except ServingError:
        for engine in loaded:
            with contextlib.suppress(ServingError):
                engine.unload_adapter(name)
        raise
    return infos[0]


def unload_in_all(engines: Sequence[ZmqEngineClient], name: str) -> AdapterInfo:
    """Unload an adapter in all engines that have it, one after another. Raises UnknownModel if none
    has it, and EngineNotReady if there are no engines."""
    _check(engines)
    having = [engine for engine in engines if any(info.name == name for info in engine.adapters)]
    if not having:
        raise UnknownModel(f"there is no adapter {name!r:.200}", param="lora_name")
    infos = [engine.unload_adapter(name) for engine in having]
    return infos[0]


def _check(engines: Sequence[ZmqEngineClient]) -> None:
    if not engines:
        raise EngineNotReady("no engine is ready", retry_after_s=1)
