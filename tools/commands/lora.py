"""`tidegate lora`: loads, unloads and lists the LoRA adapters of an engine."""

from __future__ import annotations

import argparse

from protocol.engine.adapters import AdapterInfo
from protocol.sdk.client import Client
from protocol.wire.errors import ServingError
from tools.failure import Failure
from tools.flags import OneLineParser
from tools.processes.discovery import add_engine_options, connect
from tools.terminal import clean

DESCRIPTION = """\
Load, unload and list LoRA adapters. The command connects to the engine directly, so it works when
HTTP is down. It changes one engine; the routes of the HTTP API change all engines of a model.
"""

EXAMPLES = """\
examples:
  tidegate lora list
  tidegate lora load french french       the directory `french` in --lora-dir of the server
  tidegate lora unload french            returns when its open requests have ended
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=OneLineParser
    )
    loading, unloading, listing = (
        actions.add_parser(name, help=about, description=f"{about.capitalize()}.")
        for name, about in (
            ("load", "load an adapter"),
            ("unload", "unload an adapter, once its open requests have ended"),
            ("list", "list the adapters that requests can use"),
        )
    )
    for action in (loading, unloading):
        action.add_argument("name", metavar="NAME", help="name of the adapter")
    loading.add_argument(
        "path", metavar="PATH", help="its directory, relative to --lora-dir of the server"
    )
    loading.set_defaults(action=lambda engine, given: [engine.load_adapter(given.name, given.path)])
    unloading.set_defaults(action=_unload)
    listing.set_defaults(action=lambda engine, given: engine.adapters)
    for action in (loading, unloading, listing):
        add_engine_options(action)


def run(options: argparse.Namespace) -> int:
    with connect(options, "lora") as engine:
        try:
            infos: list[AdapterInfo] = options.action(engine, options)
        except ServingError as error:
            raise Failure(clean(error.message)) from None
    for info in infos:
        print(f"{clean(info.name)}  rank {info.rank}  {info.digest[:8]}  {clean(info.path)}")
    return 0


def _unload(engine: Client, options: argparse.Namespace) -> list[AdapterInfo]:
    info = engine.unload_adapter(options.name)
    print(f"unloaded {clean(info.name)}")
    return []
