"""A whole server for tests: `tidegate serve` with the real model on a port of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.support.model import smollm2_gguf
from tests.support.ports import free_port
from tests.support.processes import ROOT, Program

START_TIMEOUT_S = 90.0
POISON = ("--poison-slots", "wild")
SERVED_NAME = "tidegate-test"
"""Name of the served model, for tests that do not use the model's own name."""


class Server(Program):
    """A `tidegate serve` process that is ready inside its `with` block.

    Free slots are poisoned, so that state that leaks between requests shows in any test, unless
    `options` turn that off.

    model      the argument MODEL; None: the default model; "": none
    models     the arguments MODEL of a server with several models, in place of `model`
    port       0: any free one
    url        HTTP address
    address    ZeroMQ address of the engine
    ready_s    duration of the start, as the server prints it
    """

    def __init__(
        self,
        *options: str,
        model: str | None = None,
        models: Sequence[str] = (),
        cwd: Path = ROOT,
        port: int = 0,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        names = models or [str(smollm2_gguf()) if model is None else model]
        names = [name for name in names if name]
        arguments = [
            "-P",
            "-m",
            "tools",
            "serve",
            *names,
            "--port",
            str(self.port),
            *POISON,
            *options,
        ]
        super().__init__(arguments, cwd=cwd)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.address = self.line_with("ZeroMQ:", timeout_s=START_TIMEOUT_S).split()[1]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        (ready,) = re.findall(r"ready in ([0-9.]+) s", "\n".join(self.out))
        self.ready_s = float(ready)
        return self
