"""`tidegate models`, and the argument MODEL of other commands.

MODEL is a name from the catalogue, a .gguf file, or a Hugging Face directory. A catalogue name
takes precedence over a directory of the same name; ./NAME selects the directory.
"""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from pathlib import Path

from protocol.exit_codes import ExitCode
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.fetch import (
    PrintLine,
    cached_file,
    fetch,
    home,
    is_cached,
    print_on_stderr,
)

DESCRIPTION = "List the built-in models: what they are, and where their files are."

EXAMPLES = """\
examples:
  tidegate models
"""


def add_model(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Add the argument MODEL. `default` is its value if the user does not give it."""
    parser.add_argument(
        "model",
        nargs="?",
        default=default,
        metavar="MODEL",
        help="a Hugging Face directory, a .gguf file, or a name from `tidegate models` "
        f"(default {DEFAULT})",
    )


def resolve(
    model: str, cache: Path, print_line: PrintLine = print_on_stderr, *, text_only: bool = False
) -> Path:
    """Return the absolute path of MODEL. Download a catalogue model first. Raises Failure.

    cache        directory of downloaded models
    print_line   prints a line of progress
    text_only    accept a directory that contains only a tokenizer
    """
    if entry := CATALOGUE.get(model):
        return fetch(entry, cache, print_line)
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        needed = "tokenizer.json" if text_only else "config.json"
        if not (path / needed).is_file():
            raise _bad_model(f"{path} is not a Hugging Face model directory: it has no {needed}")
        return path
    if not path.is_file():
        raise _bad_model(f"no model {model!r}: {_suggestion(model)}")
    if path.suffix != ".gguf":
        raise _bad_model(f"{path} is neither a .gguf file nor a Hugging Face directory")
    return path


def _suggestion(model: str) -> str:
    """Return advice for a user whose MODEL is neither a path nor in the catalogue."""
    hub = re.fullmatch(r"[\w.-]+/([\w.-]+)", model)
    name = (hub[1] if hub else model).lower()
    if close := get_close_matches(name, CATALOGUE, n=1, cutoff=0.5):
        return f"did you mean {close[0]}?"
    if hub:
        return (
            "models are not downloaded from the Hugging Face hub; download it first (hf download "
            f"{model} --local-dir {hub[1]}), then give its directory"
        )
    return f"it is neither a path nor a name in the catalogue ({', '.join(CATALOGUE)})"


def _bad_model(message: str) -> Failure:
    return Failure(message, exit_code=ExitCode.BAD_MODEL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(options: argparse.Namespace) -> int:
    """Print the models of the catalogue, and where their files are."""
    cache = home()
    for entry in CATALOGUE.values():
        where = str(cached_file(entry, cache)) if is_cached(entry, cache) else "not downloaded yet"
        print(f"{entry.name}\n  {entry.description}")
        print(f"  {entry.licence}, {entry.file_bytes / 1e6:.0f} MB; {where}")
    print(f"\ncache: {cache}  (set $TIDEGATE_HOME to change it)")
    return 0
