"""Values for completion that depend on this machine: models, ports and names of keys."""

from __future__ import annotations

from collections.abc import Sequence

from tools.completion.tree import Kind


def values(kind: Kind, words: Sequence[str]) -> list[str]:
    """Return the values of a kind on this machine; none if they cannot be read.

    words   the arguments of the command so far; the first one is the file of API keys
    """
    match kind:
        case "model":
            return _models()
        case "port":
            from tools.processes.discovery import running

            return [str(server.port) for server in running()]
        case "key" if words:
            from protocol.shared import api_keys

            try:
                return list(api_keys.read(words[0]))
            except (OSError, ValueError):
                return []
    return []


def _models() -> list[str]:
    """Return the names of the catalogue, and those of the models in the caches."""
    from tools.models.catalogue import CATALOGUE, HUB_MODELS
    from tools.models.fetch import home
    from tools.models.stored import stored_models

    stored = [model.name for model in stored_models(home())]
    return list(dict.fromkeys([*CATALOGUE, *HUB_MODELS, *stored]))
