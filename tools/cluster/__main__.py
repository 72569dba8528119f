"""Entry point of the launcher's process: `python -m tools.cluster --config JSON`.

Only this process of a server imports Ray, besides the actors on the nodes of the cluster. It ends
with its supervisor.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import msgspec

from protocol.config.cluster import ClusterConfig
from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import attach_to_parent
from protocol.process.log_lines import log_to_stderr
from protocol.process.process_title import set_title

log = logging.getLogger("cluster")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


def main(arguments: list[str] | None = None) -> int:
    log_to_stderr("cluster")
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    parser.add_argument("--config", required=True, help="a ClusterConfig as JSON")
    try:
        config = msgspec.json.decode(parser.parse_args(arguments).config, type=ClusterConfig)
    except msgspec.MsgspecError as error:
        log.error("bad --config: %s", error)
        return ExitCode.USAGE
    log_to_stderr("cluster", config.log_format)
    set_title("launcher")
    parent = attach_to_parent(signal.SIGTERM)
    for number in STOP_SIGNALS:  # nothing has to be stopped until the launcher runs
        signal.signal(number, lambda *_: os._exit(ExitCode.OK))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Importing Ray takes a third of a second, which a bad --config should not cost.
    from tools.cluster.connection import connect
    from tools.cluster.launcher import Launcher
    from tools.failure import Failure

    try:
        connect(config.cluster)
        wanted = {name: os.environ[name] for name in config.environment if name in os.environ}
        end = Launcher(config, wanted).run()
        code, cause = end.code, end.cause
    except Failure as failure:
        code, cause = failure.exit_code, str(failure)
    if cause:
        log.error("%s", cause)
        parent.send_cause(cause)
    return code


if __name__ == "__main__":
    sys.exit(main())
