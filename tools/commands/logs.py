"""`tidegate logs`: shows the log of a running server, from its run directory (server_log.py).

The log has the lines that the server prints, as text or as JSON (--log-format). They contain no
prompts and no answers, unless the server runs with --log-content.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.process.log_lines import colored
from protocol.shared import request_ids
from tools.failure import Failure
from tools.models.fetch import home
from tools.processes import run_lock
from tools.processes.discovery import START_ONE, base_directory
from tools.processes.server_log import LOG_FILE, OLD_LOG_FILE, LogReader, ended_logs
from tools.terminal import safe_text, use_colors

DESCRIPTION = """\
Show the log of a running server or engine: what all its processes have printed. The log ends with
the server, except that of `tidegate serve --detach`, which is kept until the next one on its port.
"""

EXAMPLES = """\
examples:
  tidegate logs                            the last lines of your only server
  tidegate logs -f --level warning         warnings and errors from now on
  tidegate logs 8001 --request chatcmpl-7f3a9c
"""

LEVELS = ("debug", "info", "warning", "error", "critical")
DEFAULT_LINES = 50
POLL_S = 0.2
_ID = re.compile(r"(?:^| )id=(\S+)")
"""The id of a request in a line of text, as the access log writes it."""
_HEAD = re.compile(r"(?P<head>\d\d:\d\d:\d\d [^\[\]]+\[\d+\]) (?P<level>[A-Z]+) (?P<rest>.*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="PORT",
        help="port, or a name from `tidegate ps` (default: your only server)",
    )
    parser.add_argument("--port", metavar="PORT", help="the same as PORT")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the server ends, or until Ctrl-C"
    )
    parser.add_argument(
        "-n",
        "--lines",
        type=_number,
        metavar="N",
        default=DEFAULT_LINES,
        help=f"show the last N log lines; all: every line (default {DEFAULT_LINES})",
    )
    parser.add_argument("--level", choices=LEVELS, default="debug", help="lowest level to show")
    parser.add_argument(
        "--request",
        metavar="ID",
        help="show only lines about this request; the beginning of its id is enough, if no other "
        "request in the log has it",
    )


def run(options: argparse.Namespace) -> int:
    if options.name and options.port:
        raise Failure("give the port once, as an argument or as --port", exit_code=ExitCode.USAGE)
    directory = _directory(options.name or options.port)
    reader = LogReader(directory)
    lines = list(reader.read())
    chosen = LogFilter(options.level, _request(options, lines))
    has_color = use_colors()
    try:
        for record in _last(chosen.push(lines), options.lines):
            _show(record, has_color=has_color)
        if options.follow:
            _follow(directory, reader, chosen, has_color=has_color)
        if run_lock.holder(directory) is None:
            print("the server has ended", file=sys.stderr)
    except KeyboardInterrupt:
        return 0  # the usual end of --follow
    return 0


def _request(options: argparse.Namespace, lines: Iterable[bytes]) -> str | None:
    """Return the id of the request whose lines are shown. Raises Failure if several ids in the log
    begin with the given text, or if none does and no more lines are waited for."""
    if options.request is None:
        return None
    every = LogFilter("debug", None)
    ids = (each.request for each in every.push(lines) if each.request)
    known = request_ids.choose(ids, options.request)
    if len(known) > 1:
        raise Failure(request_ids.several(options.request, known), exit_code=ExitCode.USAGE)
    if not known and not options.follow:
        raise Failure(f"no line of the log is about a request {options.request}")
    return known[0] if known else str(options.request)


def _follow(directory: Path, reader: LogReader, chosen: LogFilter, *, has_color: bool) -> None:
    """Show new lines until the server has ended."""
    while True:
        is_over = run_lock.holder(directory) is None  # looked up first: its last lines follow
        for record in chosen.push(reader.read()):
            _show(record, has_color=has_color)
        if is_over:
            return
        sys.stdout.flush()
        time.sleep(POLL_S)


def _directory(name: str | None) -> Path:
    """Return the run directory with this name, or the only one that has a log. Raises Failure if
    there is none, or if there are several."""
    base = base_directory()
    if name is not None:
        ended = ended_logs(home()) / Path(name).name
        for directory in (*run_lock.run_directories(base), ended):
            if directory.name == name and _has_log(directory):
                return directory
        raise Failure(f"{name} has no log; running: {_names(_with_logs(base))}")
    found = _with_logs(base)
    if not found:
        raise Failure(f"no running server has a log; {START_ONE}")
    if len(found) > 1:
        message = f"{len(found)} servers have a log: {_names(found)}; give one as PORT"
        raise Failure(message, exit_code=ExitCode.USAGE)
    return found[0]


def _with_logs(base: Path) -> list[Path]:
    """Return the run directories of running servers that have a log."""
    found = run_lock.run_directories(base)
    return [each for each in found if _has_log(each) and run_lock.holder(each) is not None]


def _has_log(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (LOG_FILE, OLD_LOG_FILE))


def _names(directories: Iterable[Path]) -> str:
    return ", ".join(each.name for each in directories) or "none"


def _number(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number or all, not {text!r}")
    return int(text)


def _last(records: Iterator[LogRecordText], count: int | None) -> Iterable[LogRecordText]:
    return deque(records, maxlen=count)


class LogRecordText(NamedTuple):
    """A line of the log, with the level, process and request that it names."""

    #: Time and process of a line of text; "" for JSON, and for the lines of a traceback.
    head: str
    level: str
    text: str
    #: The id of the request that the line is about; "": of none.
    request: str = ""


class _JsonRecord(msgspec.Struct):
    level: str
    request_id: str = ""


class LogFilter:
    """Selects lines of the log. The lines of a traceback follow the line before them.

    level     the lowest level
    request   the id of the request that lines must be about, with or without the prefix of an API;
              None: any line
    """

    def __init__(self, level: str, request: str | None) -> None:
        self._lowest = LEVELS.index(level)
        self._request = request
        self._before = LogRecordText("", "INFO", "")
        self._is_shown = request is None and self._lowest <= LEVELS.index("info")

    def push(self, lines: Iterable[bytes]) -> Iterator[LogRecordText]:
        """Yield the selected ones of the next lines."""
        for line in lines:
            record = self._parse(line.decode(errors="replace"))
            if self._is_shown:
                yield record

    def _parse(self, line: str) -> LogRecordText:
        """Return a line, and decide whether it is shown."""
        if line.startswith("{"):
            try:
                found = msgspec.json.decode(line, type=_JsonRecord)
            except msgspec.MsgspecError:
                return LogRecordText("", self._before.level, line)
            record = LogRecordText("", found.level, line, found.request_id)
        elif head := _HEAD.fullmatch(line):
            named = _ID.search(head["rest"])
            request = named[1] if named else ""
            record = LogRecordText(head["head"], head["level"], head["rest"], request)
        else:  # of a traceback, or printed by a library
            return LogRecordText("", self._before.level, line)
        self._before = record
        level = record.level.lower()
        is_high = level not in LEVELS or LEVELS.index(level) >= self._lowest
        is_about = self._request is None or request_ids.matches(record.request, self._request)
        self._is_shown = is_high and is_about
        return record


def _show(record: LogRecordText, *, has_color: bool) -> None:
    head, level = record.head, record.level
    text = safe_text(record.text) if sys.stdout.isatty() else record.text
    if head and has_color:
        head, level = colored(head, level)
    print(f"{head} {level} {text}" if head else text)
