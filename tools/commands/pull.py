"""`tidegate pull`: downloads a model into the cache, or brings it up to date."""

from __future__ import annotations

import argparse

from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.fetch import fetch, home
from tools.models.pulling import download_name, pull_model
from tools.terminal import Terminal

DESCRIPTION = """\
Download a model into the cache, verify it, and print where it is. A download that was interrupted
is continued. A model from the Hugging Face Hub that is in the cache is brought up to date.
"""

EXAMPLES = f"""\
examples:
  tidegate pull                                   the default model, {DEFAULT}
  tidegate pull qwen3-0.6b                        a model from the catalogue (tidegate models)
  tidegate pull Qwen/Qwen3-0.6B                   safetensors files from the Hugging Face Hub
  tidegate pull owner/repo:Q4_0                   the GGUF file of this quantisation
  tidegate pull owner/repo@v1.1:model.gguf        one file, at a branch, tag or commit
  tidegate pull https://host/model.gguf#sha256=0123...

variables of huggingface_hub:
  HF_TOKEN          token for private models and for models with terms
  HF_ENDPOINT       URL of a mirror of the Hub
  HF_HOME           directory of its cache, which other programs share
  HF_HUB_OFFLINE    1: use only what is in the cache
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT,
        metavar="MODEL",
        help="a name from `tidegate models`, OWNER/REPO or OWNER/REPO:QUANTISATION on the Hugging "
        f"Face Hub, or URL#sha256=HEX (default {DEFAULT})",
    )


def run(options: argparse.Namespace) -> int:
    print_line = Terminal().progress
    if entry := CATALOGUE.get(options.model):
        path = str(fetch(entry, home(), print_line))
    else:
        path = pull_model(download_name(options.model), home(), print_line).path
    print(path)
    return 0
