"""Python runs this at the start of every program under test (`processes.Program` sees to it): one
that unpickles a class or a function, whoever sent it, ends at once and says where."""

import os
import sys
import traceback

EXIT_CODE = 97


def _end_who_unpickles(event: str, _: object) -> None:
    if event == "pickle.find_class":
        traceback.print_stack()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


sys.addaudithook(_end_who_unpickles)
