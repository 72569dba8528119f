"""Completion in shells, by argcomplete: the values that the parser of the command line does not
list.

The script that `tidegate completion` prints lets the shell start `tidegate` for each completion,
with the line so far in the environment. argcomplete then reads the line with the parser, and prints
the suggestions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import argcomplete
from argcomplete.completers import BaseCompleter, DirectoriesCompleter, FilesCompleter


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the suggestions for the line that a shell has put into the environment, and exit."""
    argcomplete.autocomplete(
        parser, always_complete_options=False, default_completer=ValueCompleter()
    )


TAKERS = ("serve", "config", "doctor")
"""Commands whose port must be free, so those of running servers are not suggested."""


class ValueCompleter(BaseCompleter):
    """Suggests values for an option or an argument without `choices`, by its name in the usage.
    Suggests nothing for any other text, and nothing if the values cannot be read."""

    def __call__(
        self,
        *,
        prefix: str,
        action: argparse.Action,
        parser: argparse.ArgumentParser,
        parsed_args: argparse.Namespace,
    ) -> Iterable[str]:
        name = str(action.metavar)
        if name.startswith("{"):  # a choice of `tools.flags`
            return name.strip("{}").split(",")
        match name:
            case "FILE" | "PATH":
                return FilesCompleter()(prefix)
            case "DIRECTORY":
                return DirectoriesCompleter()(prefix=prefix)
            case "MODEL":
                return [*_models(), *FilesCompleter("gguf")(prefix)]
            case "PORT" if parser.prog.split()[-1] not in TAKERS:
                from tools.processes.discovery import running

                return [str(server.port) for server in running()]
            case "KEY_NAME":
                from protocol.shared import api_keys

                try:
                    return list(api_keys.read(parsed_args.file))
                except (OSError, ValueError):
                    return []
        return []


def _models() -> Iterable[str]:
    """Return the names of the catalogue, and those of the models in the caches."""
    from tools.models.catalogue import CATALOGUE, HUB_MODELS
    from tools.models.fetch import home
    from tools.models.stored import stored_models

    return [*CATALOGUE, *HUB_MODELS, *(model.name for model in stored_models(home()))]
