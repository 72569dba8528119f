"""`tidegate cluster-key FILE`: creates a cluster key."""

from __future__ import annotations

import argparse

from protocol.wire.cluster_key import write_cluster_key
from tools.failure import Failure
from tools.paths import user_path

DESCRIPTION = """\
Write a new cluster key to FILE. All engines and gateways of a cluster need the same key. Over TCP
they accept only connections with the key, and it seals the K/V handles that one engine passes to
another. Copy the file to the other hosts as you would copy a private SSH key. Its mode must stay
0600.
"""

EXAMPLES = """\
example:
  tidegate cluster-key cluster.key
  scp -p cluster.key other-host:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file to create; must not exist")


def run(options: argparse.Namespace) -> int:
    path = str(user_path(options.file))
    try:
        write_cluster_key(path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote a new cluster key to {path} (mode 0600)")
    return 0
