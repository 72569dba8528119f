"""`tidegate key FILE`: a new key for a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from protocol.cluster_key import write_cluster_key
from tools.failure import Failure

DESCRIPTION = """\
Write a new cluster key into FILE. The engines and gateways of one cluster share it: over TCP they
hear nobody else, and only who has it can hand a computed prompt from one engine to another. Carry
the file to the other hosts as you would a private SSH key; it has to keep its mode, 0600.
"""

EXAMPLES = """\
example:
  tidegate key cluster.key
  scp -p cluster.key other-host:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="where to write it; must not exist")


def run(options: argparse.Namespace) -> int:
    path = str(Path(options.file).expanduser())
    try:
        write_cluster_key(path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None
    print(f"{path}: a new cluster key, for its owner alone (mode 0600)")
    return 0
