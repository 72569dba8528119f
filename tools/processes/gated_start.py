"""Starts processes before it is known whether they can be used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Self

from protocol.start_gate import StartGate
from tools.processes.children import Child, Command


class GatedStart:
    """Starts processes that wait at a gate until the `with` block ends.

    An exception in the block kills the processes, without printing any of their output. Otherwise
    the gate opens, and `children` has the processes in the order in which they were started. Their
    output stays in the pipes until somebody reads it.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        self._gate = StartGate()
        return self

    def start(self, commands: Iterable[Command]) -> None:
        """Start a process for each command. Call this inside the `with` block."""
        for each in commands:
            gated = replace(
                each,
                environment={**each.environment, **self._gate.environment},
                keeps_open=[*each.keeps_open, self._gate.fd],
            )
            self.children.append(Child(gated))

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None:
            for child in self.children:
                child.discard()
        self._gate.open()
