"""`python -P -m worker.startup.check_config FILE`: check whether a config.json can be served.

This needs no weights, so a model that is not supported is found before they are downloaded. If the
model is not supported, the exit code is that of ExitCode.BAD_MODEL, and stderr has the reason and
the remedy in one line. torch is not imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from protocol.exit_codes import ExitCode
from worker.loading.errors import UnusableModel
from worker.loading.fields import read_json
from worker.models.architectures import fallback
from worker.models.families.registry import find_family

REMEDY = "use another model"


def check_config(file: Path) -> None:
    """Raise UnusableModel if the config.json in `file` describes a model that is not supported."""
    config = read_json(file)
    if fallback(config) is None:
        find_family(config).spec(config)


def main() -> int:
    try:
        check_config(Path(sys.argv[1]))
    except UnusableModel as error:
        print(f"{error.message}; {error.remedy or REMEDY}", file=sys.stderr)
        return ExitCode.BAD_MODEL
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
