"""The table of LoRA adapters of a fake worker, without tensors."""

from __future__ import annotations

from collections import deque

from engine_core.adapters import AdapterCommand, AdapterReply
from engine_core.engine import Engine
from protocol.engine.adapters import AdapterInfo
from protocol.wire.errors import InvalidRequest
from protocol.worker.steps import NO_ADAPTER, AdapterLoad, AdapterReport, StepPlan

ROOT = "/adapters"


def adapter_info(name: str) -> AdapterInfo:
    """Return an adapter that the worker has loaded at its start."""
    return AdapterInfo(name=name, digest=f"{name} at the start", rank=8, path=name)


class EchoAdapters:
    """Answers the engine's commands about adapters, one at a time and in order, and checks that
    plans use only what is loaded.

    rows       row -> generation of what it holds
    commands   commands that are not carried out yet
    replies    (client, reply) of the engine
    """

    def __init__(self, started: list[str]) -> None:
        self.rows = dict.fromkeys(range(len(started)), 1)
        self.commands: deque[AdapterCommand] = deque()
        self.replies: list[tuple[bytes, AdapterReply]] = []
        #: Slot -> row and generation of its adapter.
        self._slots: dict[int, tuple[int, int]] = {}
        self._num_loaded = 0

    def check(self, plan: StepPlan) -> None:
        """Check that the rows of a plan use adapters that are loaded."""
        for init in plan.bind:
            self._slots[init.slot] = init.adapter, init.adapter_generation
        for slot in plan.row_slots.tolist():
            row, generation = self._slots[slot]
            assert row == NO_ADAPTER or self.rows[row] == generation, "the adapter is not loaded"

    def run(self, engine: Engine, *, fails: bool = False) -> None:
        """Carry out the oldest command. `fails` makes a load fail."""
        command = self.commands.popleft()
        row, generation = command.row, command.generation
        report = AdapterReport(row=row, generation=generation)
        if not isinstance(command, AdapterLoad):
            assert self.rows.pop(row) == generation
        elif fails:
            error = InvalidRequest("the file is damaged", param="lora_path").info()
            report = AdapterReport(row=row, generation=generation, error=error)
        else:
            assert row not in self.rows, "the row is not free"
            self.rows[row] = generation
            self._num_loaded += 1
            digest = f"{command.path} {self._num_loaded}"
            report = AdapterReport(row=row, generation=generation, digest=digest, rank=4)
        self.replies.append(engine.on_adapter_report(report))
