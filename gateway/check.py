"""Checks whether a gateway could start with its options: `python -P -m gateway.check`.

The config comes as JSON in TIDEGATE_GATEWAY. If an option is invalid, the exit code is 2 and stderr
has one line. No port is opened, and no engine is contacted.
"""

from __future__ import annotations

import sys

from gunicorn.errors import AppImportError

from gateway.app import CANNOT_START, EXTENSION, create_app
from protocol.exit_codes import ExitCode


def main() -> int:
    try:
        app = create_app()
    except AppImportError as error:
        print(str(error).removeprefix(CANNOT_START), file=sys.stderr)
        return ExitCode.USAGE
    app.extensions[EXTENSION].templates.close()
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
