"""Kills, stops or terminates each process of a real `tidegate serve` at each moment, and checks the
server and its clients.

    python -m tests.torture.signals [--kind split] [--victim worker] [--moment decode] [--signal ..]

A cell of the table is (kind of server, victim, moment, signal). `CELLS` are the cells to run.
`fate_of` is the expected result of a cell, a `TortureRow` is the actual one, and `complaints` lists
how they differ. The command prints the rows and exits with 1 if there is any complaint.
`make torture` runs all; tests/e2e/test_torture.py runs a few.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product, starmap
from pathlib import Path
from typing import Any, Self

import requests

from protocol.process.exit_codes import KILLED, ExitCode
from tests.support.processes import Program, descendants_of, is_alive
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.support.waiting import eventually
from tests.torture.observers import ReadinessObserver, TortureClient
from tests.torture.table import print_table

RESTARTS, PLAIN, SPLIT, SPLIT_RESTARTS = KINDS = ("restart", "plain", "split", "split restart")
OPTIONS = {
    RESTARTS: ("--restart", "--drain-s", "3"),
    PLAIN: ("--drain-s", "30"),
    SPLIT: ("--split", "--drain-s", "30"),
    SPLIT_RESTARTS: ("--split", "--restart", "--drain-s", "3"),
}
"""Options by kind of server. Without restarts a failure must end the open streams within
ERROR_WITHIN_S. The drain of these servers is longer, so a failure that only starts a drain is
noticed."""
GATEWAY, MASTER, ENGINE, WORKER, SUPERVISOR, PREFILLER, PREFILL_WORKER = VICTIMS = (
    "gateway process",
    "gunicorn master",
    "engine",
    "worker",
    "supervisor",
    "prefill engine",
    "prefill worker",
)
"""In a split server, "engine" is the decode engine, and "worker" is its worker."""
OF_PREFILL = (PREFILLER, PREFILL_WORKER)
START, IDLE, PREFILL, DECODE = MOMENTS = ("start-up", "idle", "prefill", "decode")
KILL, STOP, TERM = SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)

ERROR_WITHIN_S, UNREADY_WITHIN_S = 5.0, 2.0
"""Time limits on an idle machine."""
PROMPT_WORDS, ANSWER_TOKENS, BUDGET = 6000, 4000, 16
UNHARMED_TOKENS = 1000
"""Length of answers that must finish although a process of the prefill engine is lost."""
START_S, LIFE_S, ORPHANS_S = 120.0, 90.0, 15.0
KILLED_BY_KILL = KILLED + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Cell:
    victim: str
    moment: str
    signal: signal.Signals
    kind: str = RESTARTS


@dataclass(frozen=True, slots=True)
class Fate:
    """The expected result of a cell.

    codes        the server ends by itself with one of these exit codes; empty: it continues
    is_error     open requests end with an error, in time
    is_unready   /readyz answers 503 or does not answer, in time
    breaks       open streams may break off, because the process with their connections is gone.
                 If False, each stream ends with [DONE]
    """

    codes: frozenset[int] = frozenset()
    is_error: bool = False
    is_unready: bool = False
    breaks: bool = False


SERVES_ON = Fate()
BREAKS = Fate(breaks=True)
COMES_BACK = Fate(is_error=True, is_unready=True)


def ends(*codes: int, is_error: bool = False) -> Fate:
    return Fate(codes=frozenset(codes), is_error=is_error)


FATES = {
    (GATEWAY, KILL): BREAKS,
    (GATEWAY, STOP): BREAKS,
    (GATEWAY, TERM): SERVES_ON,
    (MASTER, KILL): Fate(is_error=True),
    (MASTER, STOP): SERVES_ON,
    (MASTER, TERM): ends(ExitCode.OK),
    (ENGINE, KILL): COMES_BACK,
    (ENGINE, STOP): COMES_BACK,
    (ENGINE, TERM): ends(ExitCode.OK),
    (WORKER, KILL): COMES_BACK,
    (WORKER, STOP): COMES_BACK,
    (WORKER, TERM): COMES_BACK,
    (SUPERVISOR, KILL): ends(-KILL),
    (SUPERVISOR, STOP): SERVES_ON,
    (SUPERVISOR, TERM): ends(ExitCode.OK),
    (PREFILLER, KILL): SERVES_ON,  # its prompts are computed again
    (PREFILLER, STOP): SERVES_ON,
    (PREFILLER, TERM): ends(ExitCode.OK),
    (PREFILL_WORKER, KILL): SERVES_ON,
    (PREFILL_WORKER, STOP): SERVES_ON,
    (PREFILL_WORKER, TERM): SERVES_ON,
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
"""Expected results at start-up that differ from FATES: a process that was never ready is not
restarted."""
WITHOUT_RESTART = {
    **{(each, KILL): ends(KILLED_BY_KILL, is_error=True) for each in (MASTER, ENGINE, PREFILLER)},
    **{
        (each, number): ends(ExitCode.WORKER_LOST, is_error=True)
        for each, number in product((WORKER, PREFILL_WORKER), (KILL, TERM))
    },
}
"""Expected results without restarts that differ from FATES: the death of one process ends the
server."""
CELLS = [
    *starmap(Cell, product(VICTIMS[:5], MOMENTS, SIGNALS)),
    *(
        Cell(victim, moment, number, kind)
        for kind, victims in (
            (PLAIN, VICTIMS[:4]),
            (SPLIT, (*VICTIMS[:4], PREFILLER, PREFILL_WORKER)),
            (SPLIT_RESTARTS, (*VICTIMS[:4], PREFILLER, PREFILL_WORKER)),
        )
        for victim, moment, number in product(victims, (PREFILL, DECODE), (KILL, TERM))
    ),
]


def fate_of(cell: Cell) -> Fate:
    key = cell.victim, cell.signal
    found = FATES[key]
    if cell.moment == START:
        return AT_START.get(key, found)
    if found is COMES_BACK and cell.kind == SPLIT_RESTARTS:
        return Fate(is_unready=True)  # requests wait for the decode engine, and continue
    return WITHOUT_RESTART.get(key, found) if cell.kind in (PLAIN, SPLIT) else found


@dataclass(slots=True)
class TortureRow:
    """The result of a cell. Times are seconds after the signal; None: it did not happen.

    ends        how each open stream ended; "": it did not
    end_s       time until the last stream ended
    unready_s   time until /readyz answered 503 or did not answer
    why         the reason in the answer, or that there was none
    again_s     time until a new request was answered
    code        exit code of a server that ended by itself
    orphans     processes that were left after the server's end
    """

    cell: Cell
    ends: list[str] = field(default_factory=list)
    end_s: float | None = None
    unready_s: float | None = None
    why: str = ""
    again_s: float | None = None
    code: int | None = None
    orphans: list[int] = field(default_factory=list)

    def complaints(self, slack: float = 1.0) -> list[str]:
        """Return how the result differs from the expected one. `slack` stretches time limits."""
        fate = fate_of(self.cell)
        found = [f"left behind: {self.orphans}"] if self.orphans else []
        if fate.codes and self.code not in fate.codes:
            found.append(f"ended with {self.code}, not with one of {sorted(fate.codes)}")
        if not fate.codes and self.again_s is None:
            found.append("did not serve again")
        if fate.is_unready and not _in_time(self.unready_s, UNREADY_WITHIN_S * slack):
            found.append(f"unready after {_seconds(self.unready_s)}")
        if "" in self.ends:
            found.append("an open stream never ended")
        for end in filter(None, self.ends):
            if fate.is_error and not end.startswith("error"):
                found.append(f"no clear error: {end}")
            elif end.startswith("broken") and not fate.breaks:
                found.append(f"a stream broke off: {end}")
        if fate.is_error and self.ends and not _in_time(self.end_s, ERROR_WITHIN_S * slack):
            found.append(f"an error after {_seconds(self.end_s)}")
        return found

    def cells(self) -> tuple[str, ...]:
        outcome = "serves on" if self.code is None else f"ended with {self.code}"
        return (
            *(self.cell.kind, self.cell.victim, self.cell.moment, self.cell.signal.name, outcome),
            *(_seconds(self.end_s), _seconds(self.unready_s), _seconds(self.again_s)),
            *(str(len(self.orphans)), "; ".join(dict.fromkeys(self.ends)) or self.why),
        )


COLUMNS = {
    "kind": 13,
    "victim": 15,
    "moment": 8,
    "signal": 7,
    "server": 15,
    "end s": 7,
    "unready s": 9,
    "again s": 8,
    "orphans": 7,
    "the open streams": 0,
}


def _in_time(seconds: float | None, bound: float) -> bool:
    return seconds is not None and seconds <= bound


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


class TortureScene:
    """A server with a tiny model, not ready yet. If it survives a `strike`, another may follow."""

    def __init__(self, model: Path, kind: str = RESTARTS) -> None:
        options = (*OPTIONS[kind], "--token-budget", str(BUDGET), "--max-slots", "4")
        self._server = Server(*options, model=str(model))
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
    def output(self) -> str:
        return self._server.output

    def await_ready(self) -> None:
        self._server.line_with("ZeroMQ:", timeout_s=START_S)

    def strike(self, cell: Cell) -> TortureRow:
        """Bring the server to the cell's moment, send the signal, and return the result."""
        row = TortureRow(cell)
        is_unharmed = cell.victim in OF_PREFILL and fate_of(cell) == SERVES_ON
        num_tokens = UNHARMED_TOKENS if is_unharmed else ANSWER_TOKENS
        if cell.moment == START:
            there = WORKER if cell.victim == SUPERVISOR else cell.victim
            assert eventually(lambda: self._find(there), within_s=START_S)
        else:
            self.await_ready()
        with (
            ReadinessObserver(self.url) as probe,
            TortureClient(self.url) as first,
            TortureClient(self.url) as second,
        ):
            clients: list[TortureClient] = []
            if cell.moment in (PREFILL, DECODE):
                # After an earlier cell, the port may still be that of a gateway that ends.
                assert eventually(lambda: probe.is_ready, within_s=LIFE_S), self.output
                clients.append(first)
                first.ask(3, num_tokens)
                assert eventually(first.has_begun, within_s=LIFE_S), self.output
            if cell.moment == PREFILL:
                clients.append(second)
                second.ask(PROMPT_WORDS, num_tokens)
                assert eventually(probe.sees_chunk, within_s=LIFE_S), self.output
            if cell.moment != START:
                assert eventually(lambda: probe.is_ready, within_s=LIFE_S)
            self._family.update(pid for pid, _ in descendants_of(self._server.process.pid))
            self._send_signal(cell, probe, clients, row)
        return row

    def stop(self, row: TortureRow) -> int:
        """Stop the server by SIGTERM, unless it has ended. Return its exit code. The processes that
        are left over are stored in `row.orphans`."""
        if self._server.process.poll() is None:
            self._server.signal(signal.SIGCONT)
            self._server.signal(signal.SIGTERM)
        code = self._server.end(timeout_s=LIFE_S)
        eventually(lambda: not self._left(), within_s=ORPHANS_S)
        row.orphans = self._left()
        return code

    def _send_signal(
        self,
        cell: Cell,
        probe: ReadinessObserver,
        clients: Sequence[TortureClient],
        row: TortureRow,
    ) -> None:
        """Send the cell's signal, and store the result in `row`."""
        fate = fate_of(cell)
        sent_at = time.monotonic()
        os.kill(self._find(cell.victim), cell.signal)
        if fate.codes:
            eventually(lambda: self._server.process.poll() is not None, within_s=LIFE_S)
            row.code = self._server.process.poll()
        else:
            row.again_s = self._await_answer(fate, probe, sent_at)
        eventually(lambda: all(client.end for client in clients), within_s=LIFE_S)
        row.ends = [client.end for client in clients]
        ended = [client.ended_at for client in clients if client.ended_at is not None]
        row.end_s = max(ended) - sent_at if ended else None
        if cell.moment != START:
            row.unready_s, row.why = probe.unready_since(sent_at)

    def _await_answer(self, fate: Fate, probe: ReadinessObserver, sent_at: float) -> float | None:
        """Return the seconds from `sent_at` until a new request was answered; None if none was. If
        the server is expected to become unready, wait for that first."""
        if fate.is_unready:
            eventually(lambda: probe.unready_since(sent_at)[0] is not None, within_s=LIFE_S)
        answered = eventually(self._answers, within_s=LIFE_S)
        self._family.update(pid for pid, _ in descendants_of(self._server.process.pid))
        return time.monotonic() - sent_at if answered else None

    def _answers(self) -> bool:
        body: dict[str, Any] = {"prompt": "w1 w2", "max_tokens": 2}
        try:
            return requests.post(self.url + "/v1/completions", json=body, timeout=5).ok
        except requests.RequestException:
            return False

    def _left(self) -> list[int]:
        return sorted(pid for pid in self._family if is_alive(pid))

    def _find(self, victim: str) -> int:
        """Return the victim's process id; 0 if it does not exist (yet)."""
        us = self._server.process.pid
        if victim == SUPERVISOR:
            return us
        if victim in (GATEWAY, MASTER):
            found = [pid for pid, line in descendants_of(us) if "-m gunicorn" in line]
            is_second = victim == GATEWAY  # parents come before children
            return found[is_second] if len(found) > is_second else 0
        role = '"role":"prefill"'
        for pid, line in descendants_of(us):
            if "-m engine_core" in line and (role in line) == (victim in OF_PREFILL):
                if victim in (ENGINE, PREFILLER):
                    return pid
                return next((pid for pid, own in descendants_of(pid) if "-m worker" in own), 0)
        return 0


def torture(cell: Cell, model: Path) -> TortureRow:
    """Run one cell of the table on a new server."""
    with TortureScene(model, cell.kind) as scene:
        row = scene.strike(cell)
        scene.stop(row)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="kind of server to test (default: all)"
    )
    parser.add_argument(
        "--victim", choices=VICTIMS, action="append", help="process to signal (default: all)"
    )
    parser.add_argument(
        "--moment", choices=MOMENTS, action="append", help="when to send the signal (default: all)"
    )
    parser.add_argument(
        "--signal",
        choices=[each.name for each in SIGNALS],
        action="append",
        help="signal to send (default: all)",
    )
    parser.add_argument("--slack", type=float, default=1.0, help="factor for all time limits")
    options = parser.parse_args()
    cells = [
        cell
        for cell in CELLS
        if cell.kind in (options.kind or KINDS)
        and cell.victim in (options.victim or VICTIMS)
        and cell.moment in (options.moment or MOMENTS)
        and (not options.signal or cell.signal.name in options.signal)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = write_roomy_llama(Path(folder))
        return print_table(COLUMNS, (torture(cell, model) for cell in cells), options.slack)


if __name__ == "__main__":
    sys.exit(main())
