"""What becomes of a server and its clients when one of its processes is killed, stopped or asked to
go: every process, at every moment, by every signal. Real processes, `tidegate serve --restart`.

    python -m tests.support.torture [--victim worker] [--moment decode] [--signal SIGKILL]

A cell of the table is (victim, moment, signal). What must come of it is `FATES`; what did is a
`Row`, and `complaints` says where the two differ. The command prints the rows and ends with 1 if
there is any complaint. `make torture` runs all; tests/e2e/test_torture.py runs a few.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Self

import requests

from protocol.exit_codes import KILLED, ExitCode
from tests.support.processes import Program, descendants_of, eventually, is_alive
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.torture_eyes import Client, Eye

GATEWAY, MASTER, ENGINE, WORKER, SUPERVISOR = VICTIMS = (
    "gateway process",
    "gunicorn master",
    "engine",
    "worker",
    "supervisor",
)
START, IDLE, PREFILL, DECODE = MOMENTS = ("start-up", "idle", "prefill", "decode")
KILL, STOP, TERM = SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)

ERROR_WITHIN_S, UNREADY_WITHIN_S = 5.0, 2.0
"""What is promised, on a machine that has time for us."""
DRAIN_S = 3
PROMPT_WORDS, ANSWER_TOKENS, BUDGET = 6000, 4000, 16
START_S, LIFE_S = 120.0, 90.0
KILLED_BY_KILL = KILLED + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Cell:
    victim: str
    moment: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Fate:
    """What must come of a cell.

    codes        the server's exit code is one of these, without our help; empty: it serves on
    is_told      open requests end with an error that says why, in time
    is_unready   /readyz says no, in time
    """

    codes: frozenset[int] = frozenset()
    is_told: bool = False
    is_unready: bool = False


SERVES_ON = Fate()
COMES_BACK = Fate(is_told=True, is_unready=True)


def ends(*codes: int) -> Fate:
    return Fate(codes=frozenset(codes))


FATES = {
    (GATEWAY, KILL): SERVES_ON,  # its own clients' connections break
    (GATEWAY, STOP): SERVES_ON,
    (GATEWAY, TERM): SERVES_ON,
    (MASTER, KILL): SERVES_ON,
    (MASTER, STOP): SERVES_ON,
    (MASTER, TERM): ends(ExitCode.OK),  # it was asked to go, and went
    (ENGINE, KILL): COMES_BACK,
    (ENGINE, STOP): COMES_BACK,
    (ENGINE, TERM): ends(ExitCode.OK),
    (WORKER, KILL): COMES_BACK,
    (WORKER, STOP): COMES_BACK,
    (WORKER, TERM): COMES_BACK,
    (SUPERVISOR, KILL): ends(-KILL),
    (SUPERVISOR, STOP): SERVES_ON,
    (SUPERVISOR, TERM): ends(ExitCode.OK),
}
AT_START = {
    (MASTER, KILL): ends(KILLED_BY_KILL),
    (MASTER, STOP): ends(KILLED_BY_KILL),
    (MASTER, TERM): ends(ExitCode.OK, KILLED + TERM),
    (ENGINE, KILL): ends(KILLED_BY_KILL),
    (ENGINE, STOP): ends(KILLED_BY_KILL),
    (ENGINE, TERM): ends(ExitCode.OK, KILLED + TERM),
    (WORKER, KILL): ends(ExitCode.WORKER_LOST),
    (WORKER, STOP): ends(ExitCode.WORKER_LOST),
    (WORKER, TERM): ends(ExitCode.WORKER_LOST),
}
"""Who never was ready is not started again."""


def fate_of(cell: Cell) -> Fate:
    found = FATES[cell.victim, cell.signal]
    return AT_START.get((cell.victim, cell.signal), found) if cell.moment == START else found


@dataclass(slots=True)
class Row:
    """What came of a cell. Seconds since the signal; None: it did not happen.

    end        how the open request ended, in words; "" where none was open
    again_s    until a new request was answered
    code       of a server that ended by itself
    orphans    processes that were left when it had ended
    """

    cell: Cell
    end: str = ""
    end_s: float | None = None
    unready_s: float | None = None
    why: str = ""
    again_s: float | None = None
    code: int | None = None
    orphans: list[int] = field(default_factory=list)

    def complaints(self, slack: float = 1.0) -> list[str]:
        """`slack` stretches what is promised, for a machine that is busy."""
        cell, fate = self.cell, fate_of(self.cell)
        found = [f"left behind: {self.orphans}"] if self.orphans else []
        if fate.codes and self.code not in fate.codes:
            found.append(f"ended with {self.code}, not with one of {sorted(fate.codes)}")
        if not fate.codes and self.again_s is None:
            found.append("did not serve again")
        if fate.is_unready and not _in_time(self.unready_s, UNREADY_WITHIN_S * slack):
            found.append(f"unready after {_seconds(self.unready_s)}")
        if cell.moment in (PREFILL, DECODE):
            if not self.end:
                found.append("the open request never ended")
            elif fate.is_told and not self.end.startswith("error"):
                found.append(f"no clear error: {self.end}")
            elif fate.is_told and not _in_time(self.end_s, ERROR_WITHIN_S * slack):
                found.append(f"an error after {_seconds(self.end_s)}")
        return found

    def cells(self) -> tuple[str, ...]:
        outcome = "serves on" if self.code is None else f"ended with {self.code}"
        return (
            *(self.cell.victim, self.cell.moment, self.cell.signal.name, outcome),
            *(_seconds(self.end_s), _seconds(self.unready_s), _seconds(self.again_s)),
            *(str(len(self.orphans)), self.end or self.why),
        )


HEAD = (
    *("victim", "moment", "signal", "server", "end s", "unready s", "again s", "orphans"),
    "the open request",
)


def _in_time(seconds: float | None, bound: float) -> bool:
    return seconds is not None and seconds <= bound


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


class Scene:
    """A server with a tiny model, not yet ready. `strike` may come again while it serves on."""

    def __init__(self, model: Path) -> None:
        options = ("--restart", "--drain-s", str(DRAIN_S), "--token-budget", str(BUDGET))
        self._server = Server(*options, "--max-slots", "4", model=str(model))
        self.url = self._server.url
        self._family: set[int] = set()

    def __enter__(self) -> Self:
        Program.__enter__(self._server)
        return self

    def __exit__(self, *about: object) -> None:
        for pid in [self._server.process.pid, *self._family]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        Program.__exit__(self._server, None, None, None)

    @property
    def said(self) -> str:
        return self._server.said

    def await_ready(self) -> None:
        self._server.line_with("ZeroMQ:", timeout_s=START_S)

    def strike(self, cell: Cell) -> Row:
        """Bring the server to the cell's moment, send the signal, and watch."""
        row = Row(cell)
        if cell.moment == START:
            there = WORKER if cell.victim == SUPERVISOR else cell.victim
            assert eventually(lambda: self._find(there), within_s=START_S)
        else:
            self.await_ready()
        with Eye(self.url) as eye, Client(self.url) as client:
            if cell.moment in (PREFILL, DECODE):
                client.ask(PROMPT_WORDS if cell.moment == PREFILL else 3, ANSWER_TOKENS)
                moment = eye.sees_chunk if cell.moment == PREFILL else client.has_begun
                assert eventually(moment, within_s=LIFE_S), self.said
            if cell.moment != START:
                assert eventually(lambda: eye.is_ready, within_s=LIFE_S)
            self._family.update(pid for pid, _ in descendants_of(self._server.process.pid))
            self._hit(cell, eye, client, row)
        return row

    def stop(self, row: Row) -> int:
        """The server's exit code after a SIGTERM, if it had not ended; what it left goes to the
        row."""
        if self._server.process.poll() is None:
            self._server.signal(signal.SIGCONT)
            self._server.signal(signal.SIGTERM)
        code = self._server.end(timeout_s=LIFE_S)
        eventually(lambda: not self._left(), within_s=DRAIN_S + 10)
        row.orphans = self._left()
        return code

    def _hit(self, cell: Cell, eye: Eye, client: Client, row: Row) -> None:
        fate = fate_of(cell)
        struck = time.monotonic()
        os.kill(self._find(cell.victim), cell.signal)
        if fate.codes:
            eventually(lambda: self._server.process.poll() is not None, within_s=LIFE_S)
            row.code = self._server.process.poll()
        else:
            row.again_s = self._again(fate, eye, struck)
        if cell.moment in (PREFILL, DECODE):
            eventually(lambda: client.end, within_s=LIFE_S)
            row.end, row.end_s = client.end, client.ended_at and client.ended_at - struck
        row.unready_s, row.why = eye.unready_since(struck) if cell.moment != START else (None, "")

    def _again(self, fate: Fate, eye: Eye, struck: float) -> float | None:
        """What serves on need not have been down; what comes back must have been."""
        if fate.is_unready:
            eventually(lambda: eye.unready_since(struck)[0] is not None, within_s=LIFE_S)
        answered = eventually(self._answers, within_s=LIFE_S)
        self._family.update(pid for pid, _ in descendants_of(self._server.process.pid))
        return time.monotonic() - struck if answered else None

    def _answers(self) -> bool:
        body = {"prompt": "w1 w2", "max_tokens": 2}
        try:
            return requests.post(self.url + "/v1/completions", json=body, timeout=5).ok
        except requests.RequestException:
            return False

    def _left(self) -> list[int]:
        return sorted(pid for pid in self._family if is_alive(pid))

    def _find(self, victim: str) -> int:
        """0: it is not there (yet)."""
        us = self._server.process.pid
        words = {MASTER: "-m gunicorn", GATEWAY: "-m gunicorn", ENGINE: "-m engine_core"}
        if victim == SUPERVISOR:
            return us
        wanted = words.get(victim, "-m worker")
        found = [pid for pid, line in descendants_of(us) if wanted in line]
        is_second = victim == GATEWAY  # parents come before children
        return found[is_second] if len(found) > is_second else 0


def torture(cell: Cell, model: Path) -> Row:
    """One cell, on a server of its own."""
    with Scene(model) as scene:
        row = scene.strike(cell)
        scene.stop(row)
    return row


def write_model(folder: Path) -> Path:
    return write_tiny_llama(folder, max_position_embeddings=16384)


def show(row: Iterable[str]) -> None:
    widths = (15, 8, 7, 15, 7, 9, 8, 7, 0)
    print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--victim", choices=VICTIMS, action="append")
    parser.add_argument("--moment", choices=MOMENTS, action="append")
    parser.add_argument("--signal", choices=[each.name for each in SIGNALS], action="append")
    parser.add_argument("--slack", type=float, default=1.0, help="stretches what is promised")
    said = parser.parse_args()
    signals = [each for each in SIGNALS if not said.signal or each.name in said.signal]
    num_bad = 0
    show(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for cell in product(said.victim or VICTIMS, said.moment or MOMENTS, signals):
            row = torture(Cell(*cell), model)
            show(row.cells())
            for complaint in row.complaints(said.slack):
                num_bad += 1
                print(f"    BAD: {complaint}", flush=True)
    print(f"{num_bad} complaints")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
