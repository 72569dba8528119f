"""The entry point of the command `tidegate`: checks the installation, then runs `tools`.

This module is not in a package, so it works even if another distribution has replaced one of
Tidegate's packages.
"""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from protocol.process.packages import check_rooms
    except ImportError as error:
        print(f"tidegate: the package protocol is not Tidegate's: {error}", file=sys.stderr)
        return 1
    problems = check_rooms()
    if problems:
        from protocol.process.installation import own_environment_remedy

        for problem in problems:
            print(f"tidegate: {problem.message}; {own_environment_remedy()}", file=sys.stderr)
    if any(problem.is_fatal for problem in problems):
        return 1
    from tools.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
