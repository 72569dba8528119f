"""The log of a server: its files, their bounds, and what `tidegate logs` selects from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.process.log_lines import LineFormatter
from protocol.wire.sockets import run_directory
from tests.support.commands import run_command
from tests.unit.test_log_lines import a_line
from tools.commands.logs import LogFilter
from tools.processes.run_lock import LOCK
from tools.processes.server_log import (
    LOG_FILE,
    MAX_LINE_BYTES,
    OLD_LOG_FILE,
    LogReader,
    ServerLog,
    keeping,
)
from tools.terminal import Terminal

LIMIT = 4000


def numbered(first: int, count: int) -> list[bytes]:
    return [b"line %05d" % n for n in range(first, first + count)]


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_the_files_are_bounded_and_for_the_owner_only(tmp_path: Path) -> None:
    log = ServerLog(tmp_path, LIMIT)
    for n in range(3000):
        log.write(numbered(n, 1))
        assert size_of(tmp_path) <= LIMIT + 11
    assert {path.name for path in tmp_path.iterdir()} == {LOG_FILE, OLD_LOG_FILE}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    kept = LogReader(tmp_path).read()
    assert kept == numbered(3000 - len(kept), len(kept))
    assert len(kept) > LIMIT / 2 / 11 - 1


def test_a_log_that_is_turned_off_writes_nothing(tmp_path: Path) -> None:
    ServerLog(tmp_path, 0).write([b"x"])
    assert list(tmp_path.iterdir()) == []


def test_a_very_long_line_is_cut(tmp_path: Path) -> None:
    ServerLog(tmp_path, 1 << 20).write([b"x" * 2 * MAX_LINE_BYTES, b"y"])
    assert list(map(len, LogReader(tmp_path).read())) == [MAX_LINE_BYTES, 1]


def test_a_log_that_cannot_be_written_loses_lines_and_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    log = ServerLog(directory, LIMIT)
    log.write([b"lost"])
    directory.mkdir()
    log.write([b"kept"])
    assert LogReader(directory).read() == [b"kept"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / LOG_FILE).symlink_to(target)
    ServerLog(directory, LIMIT).write([b"x"])
    assert not target.exists()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 150), max_size=30))
def test_a_reader_gets_each_line_once_and_in_order(counts: list[int]) -> None:
    """It loses lines only if the file rotates twice between two reads: after about 180 lines."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        log, reader = ServerLog(Path(name), LIMIT), LogReader(Path(name))
        read, written = [], 0
        for count in counts:
            log.write(numbered(written, count))
            written += count
            read += reader.read()
        reader.close()
        log.close()
        assert read == numbered(0, written)


def test_a_reader_that_was_late_goes_on_with_the_oldest_line(tmp_path: Path) -> None:
    log, reader = ServerLog(tmp_path, LIMIT), LogReader(tmp_path)
    log.write(numbered(0, 10))
    assert reader.read() == numbered(0, 10)
    log.write(numbered(10, 5000))
    lines = reader.read()
    assert lines[-1] == numbered(5009, 1)[0]
    own = [line for line in lines if line >= b"line 01000"]
    assert own == numbered(5010 - len(own), len(own))


def test_a_reader_continues_with_a_new_server_in_the_directory(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    assert reader.read() == []
    ServerLog(tmp_path, LIMIT).write([b"first"])
    assert reader.read() == [b"first"]
    (tmp_path / LOG_FILE).unlink()
    assert reader.read() == []
    ServerLog(tmp_path, LIMIT).write([b"second"])
    assert reader.read() == [b"second"]


def test_a_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    (tmp_path / LOG_FILE).write_bytes(b"one\ntw")
    assert reader.read() == [b"one"]
    with (tmp_path / LOG_FILE).open("ab") as file:
        file.write(b"o\n")
    assert reader.read() == [b"two"]


@pytest.mark.parametrize("style", ["text", "color", "json"])
def test_the_lines_of_a_terminal_are_kept_without_colours(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(style)  # type: ignore[arg-type]
    with keeping(tmp_path, 1, terminal):
        terminal.log("started")
        terminal.show("\nServes\n\n  details\n")
        terminal.fail("died")
    lines = [line.decode() for line in LogReader(tmp_path).read()]
    assert [any(words in line for line in lines) for words in ("started", "Serves", "died")]
    assert "ERROR" in lines[-1]
    assert len(lines) == 3
    assert "\x1b" not in "".join(lines)
    assert "died" in capsys.readouterr().err


# ---- what is selected
TEXT = [
    "13:05:12 gateway[4] INFO POST /v1/x 200 id=abc ms=1.0",
    "13:05:12 gateway[4] INFO POST /v1/x 200 id=abcd ms=1.0",
    "13:05:13 gateway[4] ERROR POST /v1/x 500 id=abc ms=1.0",
    "Traceback (most recent call last):",
    "  ValueError: x",
    "13:05:14 worker[6] WARNING abc is slow, and listens at 127.0.0.1",
    "printed by a library",
]
JSON = [
    '{"level": "INFO", "event": "request", "request_id": "abc"}',
    '{"level": "ERROR", "event": "request", "request_id": "abc"}',
    '{"level": "WARNING", "event": "x", "message": "abc is slow"}',
    '{"not": "ours"}',
]


def selected(lines: list[str], level: str = "debug", request: str | None = None) -> list[int]:
    """Return the places of the selected lines."""
    chosen = LogFilter(level, request)
    found = [len(list(chosen.push([line.encode()]))) for line in lines]
    return [place for place, count in enumerate(found) if count]


@pytest.mark.parametrize(
    ("level", "request_id", "places"),
    [
        ("debug", None, [0, 1, 2, 3, 4, 5, 6]),
        ("warning", None, [2, 3, 4, 5, 6]),
        ("error", None, [2, 3, 4]),
        ("critical", None, []),
        ("debug", "abc", [0, 2, 3, 4]),
        ("debug", "chatcmpl-abc", [0, 2, 3, 4]),
        ("error", "abc", [2, 3, 4]),
        ("debug", "ab", []),
        ("debug", "1", []),
        ("debug", "hello-1", []),
        ("debug", "hello-abc", []),
    ],
)
def test_lines_of_text_are_selected_with_those_that_follow_them(
    level: str, request_id: str | None, places: list[int]
) -> None:
    assert selected(TEXT, level, request_id) == places


@pytest.mark.parametrize(
    ("level", "request_id", "places"),
    [
        ("debug", None, [0, 1, 2, 3]),
        ("warning", None, [1, 2, 3]),
        ("debug", "abc", [0, 1]),
        ("error", None, [1]),
    ],
)
def test_json_lines_are_selected(level: str, request_id: str | None, places: list[int]) -> None:
    assert selected(JSON, level, request_id) == places


IDS = ("hello-1", "hello-2", "hello-10", "7f3a9c04", "7f3b0000", "1")


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the run directory of a server on port 8000 with a line about each of IDS."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = run_directory(8000)
    directory.parent.mkdir(mode=0o700)
    directory.mkdir(mode=0o700)
    (directory / LOCK).touch()
    lines = ["13:05:12 gateway[4] INFO listening at http://127.0.0.1:8000"]
    lines += (f"13:05:12 gateway[4] INFO POST /v1/x 200 id={each} prompt_tokens=1" for each in IDS)
    (directory / LOG_FILE).write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hello-1", ["hello-1"]),
        ("chatcmpl-hello-1", ["hello-1"]),
        ("hello-2", ["hello-2"]),
        ("1", ["1"]),
        ("chatcmpl-7f3a", ["7f3a9c04"]),
        ("7f3b0000", ["7f3b0000"]),
        ("cmpl-7f3b", ["7f3b0000"]),
    ],
)
def test_the_log_of_one_request_has_no_line_about_another(
    logged: None, capfd: pytest.CaptureFixture[str], text: str, shown: list[str]
) -> None:
    done = run_command(capfd, "logs", "8000", "--request", text)
    assert (done.code, done.err) == (0, "the server has ended\n")
    assert re.findall(r"id=(\S+)", done.out) == shown
    assert len(done.out.splitlines()) == len(shown)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("hello-", 2, "3 requests have an id like hello-: hello-1, hello-2, hello-10"),
        ("nobody", 1, "no line of the log is about a request nobody"),
        ("127", 1, "no line of the log is about a request 127"),
    ],
)
def test_an_unclear_or_unknown_request_is_named(
    logged: None, capfd: pytest.CaptureFixture[str], text: str, code: int, words: str
) -> None:
    done = run_command(capfd, "logs", "8000", "--request", text)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


def test_the_head_of_a_line_is_that_of_the_formatter() -> None:
    line = LineFormatter("engine big-1.5b").format(a_line("slow"))
    (record,) = LogFilter("debug", None).push([line.encode()])
    assert (record.level, record.text) == ("WARNING", "slow")
    assert record.head.partition(" ")[2].startswith("engine big-1.5b[")
