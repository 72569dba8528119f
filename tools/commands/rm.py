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
    parser.add_argument("models", nargs="+", metavar="NAME", help="a name from `tidegate models`")


def run(options: argparse.Namespace) -> int:
    """Remove the models, each one with all its revisions. Raises Failure at the first problem."""
    for name in options.models:
        if remove_leftovers(name, hub_cache()):
            print(f"removed what an interrupted download of {name} had left")
            continue
        found = find_stored(name, stored_models(home()))
        try:
            freed = remove_stored(home(), found)
        except OSError as error:
            raise Failure(f"cannot remove {name}: {error}") from None
        print(f"removed {name}: {format_size(freed)} freed")
    return 0
