"""Computes the steps of a replayed journal in a real worker, and compares the results.

The worker executes the plans of the replayed engine, but the engine commits the recorded results.
So once a token differs, later tokens of the same request may differ only because of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import zmq
from msgspec.structs import astuple, replace

from engine_core.adapters import AdapterCommand
from engine_core.journal.records import StartRecord
from engine_core.workers.link import WorkerLink
from protocol.engine.adapters import AdapterInfo
from protocol.engine.model_card import ModelCard
from protocol.wire.arrays import Array
from protocol.worker.steps import (
    EncodePlan,
    EncodeResult,
    Logprobs,
    Masks,
    StepPlan,
    StepResult,
    WorkerReady,
)

POLL_MS = 1000


class NotComparable(Exception):
    """The steps of a journal cannot be computed again, or their results need not be equal."""


@dataclass
class StepComparison:
    """Counts of results that were computed again, and of those that equal the recorded ones bit by
    bit."""

    num_steps: int = 0
    num_tokens: int = 0
    num_equal_tokens: int = 0
    #: Number of logprob entries, for sampled tokens and prompt tokens.
    num_logprobs: int = 0
    num_equal_logprobs: int = 0
    #: Number of results of inputs that were encoded.
    num_vectors: int = 0
    num_equal_vectors: int = 0
    #: Describes the first step whose result differs; "" if there is none.
    first_difference: str = ""

    @property
    def is_same(self) -> bool:
        return not self.first_difference

    def add(self, recorded: StepResult, computed: StepResult, where: str) -> None:
        """Compare the results of one step."""
        self.num_steps += 1
        old, new = recorded.tokens.tolist(), computed.tokens.tolist()
        equal = sum(a == b for a, b in zip(old, new, strict=False))
        self.num_tokens += len(old)
        self.num_equal_tokens += equal
        difference = "" if old == new else f"tokens were {_some(old)}, are {_some(new)}"
        kinds = {
            "logprobs": (recorded.logprobs, computed.logprobs),
            "prompt logprobs": (recorded.prompt_logprobs, computed.prompt_logprobs),
        }
        for name, (before, now) in kinds.items():
            entries, others = _entries(before), _entries(now)
            equal = sum(a == b for a, b in zip(entries, others, strict=False))
            self.num_logprobs += len(entries)
            self.num_equal_logprobs += equal
            if not difference and entries != others:
                difference = f"{len(entries) - equal} of {len(entries)} {name} differ"
        if not difference and recorded.failed != computed.failed:
            rows = _some(recorded.failed.tolist()), _some(computed.failed.tolist())
            difference = "failed rows were {}, are {}".format(*rows)
        if difference and not self.first_difference:
            self.first_difference = f"{where}, step {recorded.step}: {difference}"

    def add_encoded(self, recorded: EncodeResult, computed: EncodeResult, where: str) -> None:
        """Compare the results of one step that encodes."""
        self.num_steps += 1
        count = len(recorded.vectors)
        is_comparable = recorded.vectors.shape == computed.vectors.shape
        equal = sum(
            is_comparable and _row(recorded.vectors, i) == _row(computed.vectors, i)
            for i in range(count)
        )
        self.num_vectors += count
        self.num_equal_vectors += equal
        if equal < count and not self.first_difference:
            self.first_difference = (
                f"{where}, step {recorded.step}: {count - equal} of {count} vectors differ"
            )

    def summary(self) -> str:
        """Return the counts as text, and the first difference, if there is one."""
        text = (
            f"computed again: {self.num_equal_tokens:,} of {self.num_tokens:,} tokens are equal, "
            f"{self.num_equal_logprobs:,} of {self.num_logprobs:,} logprobs"
        )
        if self.num_vectors:
            text += f", {self.num_equal_vectors:,} of {self.num_vectors:,} vectors"
        if self.first_difference:
            text += f"\nthe first difference: {self.first_difference}"
        return text


class ReplayWorker:
    """The real worker process that computes the steps of journals. It is started for the first
    file of an engine, and continues with the files that follow it.

    any_fingerprint   compare even if the fingerprints of the recording and of this machine differ,
                      so that bits can differ too, for example because of other kernels
    """

    def __init__(self, *, any_fingerprint: bool = False) -> None:
        #: The results of the current file.
        self.comparison = StepComparison()
        self._any_fingerprint = any_fingerprint
        self._start: StartRecord | None = None
        self._process = ExitStack()
        self._link: WorkerLink | None = None

    def start(self, record: StartRecord) -> None:
        """Start the worker, or continue with the next file of the same engine.

        Raises NotComparable if the steps cannot be computed again, if their results need not be
        equal. Raises WorkerLost if the worker reports a failure, or if its process ends.
        """
        self.comparison = StepComparison()
        if self._start is not None and self._link is not None and _follows(self._start, record):
            self._start = record
            return
        self.close()
        if record.part > 1:
            raise NotComparable(
                f"file {record.part} of its engine needs the K/V of the files before it, which a "
                "journal does not contain; replay a directory that has all files of the engine"
            )
        if record.config.is_group:
            raise NotComparable("the steps of several workers (--tensor-parallel) are not repeated")
        if record.tiers:
            raise NotComparable("with tiers (--kv-host-gib, --kv-disk) steps cannot be repeated")
        self._link = self._new_link(record)
        ready = self._ready()
        check_card(record.model, ready.model, any_fingerprint=self._any_fingerprint)
        check_adapters(record.adapters, ready.adapters)
        self._start = record

    def send(self, message: StepPlan | EncodePlan | Masks | AdapterCommand) -> None:
        """Send a plan or its masks to the worker. Raises NotComparable for a command about LoRA
        adapters, because their files may have changed."""
        assert self._link is not None, "not started"
        if not isinstance(message, StepPlan | Masks):
            raise NotComparable(
                "adapters were loaded or unloaded while the engine ran; only steps with adapters "
                "that it loaded at its start (--lora) can be repeated"
            )
        self._link.send(message)

    def compare(self, recorded: StepResult | EncodeResult, where: str) -> None:
        """Wait for the result of the oldest step, and compare it. Raises WorkerLost if the worker
        process ends, and NotComparable if the worker returns no result of this step."""
        computed = self._receive()
        match recorded, computed:
            case StepResult(), StepResult() if computed.step == recorded.step:
                self.comparison.add(recorded, computed, where)
            case EncodeResult(), EncodeResult() if computed.step == recorded.step:
                self.comparison.add_encoded(recorded, computed, where)
            case _:
                raise NotComparable(f"{where}: the worker has no result of step {recorded.step}")

    def close(self) -> None:
        """Stop the worker, if it was started."""
        self._process.close()
        self._link = self._start = None

    def _new_link(self, record: StartRecord) -> WorkerLink:
        folder = self._process.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-replay-"))
        context = self._process.enter_context(zmq.Context())
        limits = record.limits
        worker = replace(
            record.config.worker,
            kv_blocks=limits.num_blocks,
            max_slots=limits.max_slots,
            block_tokens=limits.block_tokens,
        )
        config = replace(record.config, worker=worker, token_budget=limits.token_budget)
        link = WorkerLink(context, config, f"ipc://{Path(folder) / 'worker'}")
        self._process.callback(link.stop)
        return link

    def _ready(self) -> WorkerReady:
        while not isinstance(message := self._receive(), WorkerReady):
            pass
        return message

    def _receive(self) -> object:
        """Wait for the worker's next message, and return it. Raises WorkerLost if the worker
        reports a failure, or if its process ends."""
        link = self._link
        assert link is not None, "not started"
        poller = zmq.Poller()
        for source in (link.socket, link.death):
            poller.register(source, zmq.POLLIN)
        while (message := link.receive()) is None:
            if link.death in dict(poller.poll(POLL_MS)) and (message := link.receive()) is None:
                raise link.exit_error()
        return message


def check_card(recorded: ModelCard, found: ModelCard, *, any_fingerprint: bool = False) -> None:
    """Raise NotComparable if the worker's model is not that of the journal. Without
    `any_fingerprint`, also raise it if the fingerprints differ or are empty."""
    if found.digest != recorded.digest:
        raise NotComparable(
            f"the model {recorded.name} has changed: its digest was {recorded.digest[:8]}, and is "
            f"{found.digest[:8]}"
        )
    if recorded.numerics == found.numerics != "" or any_fingerprint:
        return
    before, now = recorded.numerics or "none", found.numerics or "none"
    raise NotComparable(
        f"the journal has fingerprint {before}, this machine {now}: tokens can differ, because "
        "kernels, C library, dtype or rounding do; --any-fingerprint compares them all the same"
    )


def check_adapters(recorded: Sequence[AdapterInfo], found: Sequence[AdapterInfo]) -> None:
    """Raise NotComparable if the worker has loaded other LoRA adapters than the journal's."""
    for before, now in zip_longest(recorded, found):
        if before != now:
            name = (before or now).name
            raise NotComparable(f"the LoRA adapter {name} has changed, or is not loaded")


def _follows(before: StartRecord, record: StartRecord) -> bool:
    """Return whether the file that starts with `record` continues the one that starts with
    `before`."""
    return record == replace(before, at=record.at, part=before.part + 1)


def _entries(logprobs: Logprobs | None) -> list[bytes]:
    """Return the bytes of each logprobs entry (one row of each column), then of each row of
    `drawn`."""
    if logprobs is None:
        return []
    columns = [each for each in astuple(logprobs) if isinstance(each, Array)]
    count = len(logprobs.ids)
    rows = [
        b"".join(_row(each, i) for each in columns if each.shape[0] == count) for i in range(count)
    ]
    if logprobs.drawn is not None:
        rows += [_row(logprobs.drawn, i) for i in range(logprobs.drawn.shape[0])]
    return rows


def _row(array: Array, number: int) -> bytes:
    size = array.data.nbytes // array.shape[0]
    return bytes(array.data[number * size : (number + 1) * size])


def _some(values: Sequence[int]) -> str:
    """Return the first values as text."""
    most = 8
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "") or "none"
