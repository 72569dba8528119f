"""The entry point of the command `tidegate`: checks the installation, then runs `tools`.

It is not in a package, so it works even if another distribution has replaced one of the packages.
"""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from protocol.rooms import REMEDY, check_rooms
    except ImportError as error:
        print(f"tidegate: the package protocol is not Tidegate's: {error}", file=sys.stderr)
        return 1
    troubles = check_rooms()
    for trouble in troubles:
        print(f"tidegate: {trouble.message}; {REMEDY}", file=sys.stderr)
    if any(trouble.is_fatal for trouble in troubles):
        return 1
    from tools.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
