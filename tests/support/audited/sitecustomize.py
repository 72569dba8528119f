"""Python imports this module at the start of every program under test, because `processes.Program`
adds this folder to PYTHONPATH. A program that unpickles a class or a function prints its stack and
exits at once. Only programs that import Ray may do so: Ray pickles whatever its processes send each
other."""

import os
import sys
import traceback

EXIT_CODE = 97


def _exit_on_unpickling(event: str, _: object) -> None:
    if event == "pickle.find_class" and "ray" not in sys.modules:
        traceback.print_stack()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


sys.addaudithook(_exit_on_unpickling)
