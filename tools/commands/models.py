"""What MODEL on the command line means, and `tidegate models`.

A name from the catalogue, a .gguf file, or a Hugging Face directory. A catalogue name wins over a
folder of the same name; write ./NAME for the folder.
"""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from pathlib import Path

from protocol.exit_codes import ExitCode
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE
from tools.models.fetch import Say, fetch, home, is_cached, place, say_on_stderr

DESCRIPTION = "List the models known by name."

EXAMPLES = """\
examples:
  tidegate models                 what each is, and where it is kept
"""


def resolve(model: str, cache: Path, say: Say = say_on_stderr, *, text_only: bool = False) -> Path:
    """The absolute path of a model, fetched if it is one of the catalogue's. Raises Failure.

    say        prints a line of progress
    text_only  a directory may hold no more than a tokenizer
    """
    if entry := CATALOGUE.get(model):
        return fetch(entry, cache, say)
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        needed = "tokenizer.json" if text_only else "config.json"
        if not (path / needed).is_file():
            raise _unusable(f"{path} is no Hugging Face model directory: it has no {needed}")
        return path
    if not path.is_file():
        raise _unusable(f"no model {model!r}: {_instead(model)}")
    if path.suffix != ".gguf":
        raise _unusable(f"{path} is neither a .gguf file nor a Hugging Face directory")
    return path


def _instead(model: str) -> str:
    """Return what to type for a MODEL that is neither here nor in the catalogue."""
    hub = re.fullmatch(r"[\w.-]+/([\w.-]+)", model)
    name = (hub[1] if hub else model).lower()
    if close := get_close_matches(name, CATALOGUE, n=1, cutoff=0.5):
        return f"did you mean {close[0]}?"
    if hub:
        return (
            "nothing is fetched from the Hugging Face hub; fetch it first (hf download "
            f"{model} --local-dir {hub[1]}), then name its folder"
        )
    return f"it is neither a path here nor a name in {_names()}"


def _unusable(why: str) -> Failure:
    return Failure(why, exit_code=ExitCode.BAD_MODEL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(options: argparse.Namespace) -> int:
    """List the catalogue and what of it is in the cache."""
    cache = home()
    for entry in CATALOGUE.values():
        where = str(place(entry, cache)) if is_cached(entry, cache) else "not fetched yet"
        print(f"{entry.name}\n  {entry.what}")
        print(f"  {entry.licence}, {entry.file_bytes / 1e6:.0f} MB; {where}")
    print(f"\ncache: {cache}  ($TIDEGATE_HOME chooses another)")
    return 0


def _names() -> str:
    return "the catalogue (" + ", ".join(CATALOGUE) + ")"
