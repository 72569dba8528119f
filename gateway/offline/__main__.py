"""The text process's entrance: `python -P -m gateway.offline FD`, with its socket's descriptor."""

from __future__ import annotations

import signal
import sys

from protocol.process.lifeline import attach_to_parent
from protocol.process.quick_exit import quick_exit


def main() -> int:
    parent = attach_to_parent(signal.SIGTERM)
    from gateway.gevent_patch import patch_standard_library

    patch_standard_library()  # before other modules are imported, like the gateway's worker
    from gateway.offline.process import serve

    return serve(int(sys.argv[1]), parent)


if __name__ == "__main__":
    quick_exit(main())
