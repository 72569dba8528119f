"""`tidegate rm`: removes models from the cache."""

from __future__ import annotations

import argparse

from tools.failure import Failure
from tools.models.fetch import format_size, home
from tools.models.stored import (
    find_stored,
    hub_cache,
    remove_leftovers,
    remove_stored,
    stored_models,
)

DESCRIPTION = """\
Remove models from the cache. Files that another model in the cache shares stay. A running server
keeps its model in memory, but cannot be restarted.
"""

EXAMPLES = """\
examples:
  tidegate rm Qwen/Qwen3-0.6B
  tidegate rm owner/repo:Q4_0 smollm2-135m        the names that `tidegate models` lists
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name from `tidegate models`")


def run(options: argparse.Namespace) -> int:
    """Remove the models from the cache. Raises Failure at the first problem."""
    for name in options.models:
        try:
            freed = _remove(name)
        except OSError as error:
            raise Failure(f"cannot remove {name}: {error}") from None
        if freed is None:
            print(f"removed the partial files of an interrupted download of {name}")
        else:
            print(f"removed {name}: {format_size(freed)} freed")
    return 0


def _remove(name: str) -> int | None:
    """Remove a model, and return the number of bytes freed; None if the cache had only
    partial files of it. Raises Failure if the cache has no file of it, and OSError if a file cannot
    be removed."""
    try:
        found = find_stored(name, stored_models(home()))
    except Failure:
        if remove_leftovers(name, home(), hub_cache()):
            return None
        raise
    return remove_stored(home(), found)
