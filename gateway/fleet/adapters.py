"""Loads and unloads LoRA adapters in all engines of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from gateway.engine.client import ZmqEngineClient
from protocol.engine.adapters import AdapterInfo
from protocol.wire.errors import EngineNotReady, InvalidRequest, ServingError, UnknownModel


def load_in_all(engines: Sequence[ZmqEngineClient], name: str, path: str) -> AdapterInfo:
    """Load an adapter in all engines that lack it, one after another: in a restarted replica, too,
    if the others have kept it. If one of them cannot load it, or if an engine then has another
    adapter of this name, unload it again where it was loaded, and raise an error.

    Raises InvalidRequest if all engines have an adapter of this name, the refusal of an engine, and
    EngineNotReady if there are no engines.
    """
    _check(engines)
    known = {engine: _find(engine, name) for engine in engines}
    # If none lacks it, the first one refuses it.
    lacking = [engine for engine, info in known.items() if info is None] or engines
    loaded: list[ZmqEngineClient] = []
    try:
        for engine in lacking:
            known[engine] = engine.load_adapter(name, path)
            loaded.append(engine)
        infos = [info for info in known.values() if info is not None]
        if len({info.digest for info in infos}) > 1:
            raise InvalidRequest.at(
                "lora_path", f"an engine has another adapter {name!r}; unload it first"
            )
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
    having = [engine for engine in engines if _find(engine, name) is not None]
    if not having:
        raise UnknownModel(f"there is no adapter {name!r:.200}", param="lora_name")
    infos = [engine.unload_adapter(name) for engine in having]
    return infos[0]


def _find(engine: ZmqEngineClient, name: str) -> AdapterInfo | None:
    """Return an engine's adapter with this name; None if it has none."""
    return next((info for info in engine.adapters if info.name == name), None)


def _check(engines: Sequence[ZmqEngineClient]) -> None:
    if not engines:
        raise EngineNotReady("no engine is ready", retry_after_s=1)
