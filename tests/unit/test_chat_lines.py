"""Lines joined to messages, and the file that keeps the lines of chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.chat.lines import MAX_LINES, MessageLines, add_to_history, read_history


def messages(*lines: str) -> list[str]:
    joined = MessageLines()
    found = [joined.push(line) for line in lines]
    return [message for message in found if message is not None]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["one", "two"], ["one", "two"]),
        (["one \\", "two\\", "three", "four"], ["one \ntwo\nthree", "four"]),
        (['"""one', "", " two", 'three"""', "four"], ["one\n\n two\nthree", "four"]),
        (['"""', 'say "hi"', '"""'], ['say "hi"']),
        (['"""all in one line"""'], ["all in one line"]),
        (['  """a\\', 'b"""  '], ["a\\\nb"]),
        (['a """', "b"], ['a """', "b"]),
        (['"""never closed', "b"], []),
        (["", "  "], ["", ""]),
        (["pasted\nat once"], ["pasted\nat once"]),
    ],
)
def test_lines_are_joined_to_messages(lines: list[str], expected: list[str]) -> None:
    assert messages(*lines) == expected


def test_a_message_that_is_not_complete_is_returned_at_the_end() -> None:
    lines = MessageLines()
    assert not lines.is_open
    assert lines.push('"""one') is None
    assert lines.is_open
    assert (lines.finish(), lines.is_open) == ("one", False)


def test_the_history_keeps_the_newest_lines_for_the_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "home" / "chat_history"
    assert read_history(file) == []
    add_to_history(file, ["first", " ", "a\nb"])
    assert read_history(file) == ["first", "a", "b"]
    assert file.stat().st_mode & 0o777 == 0o600
    add_to_history(file, [f"line {n}" for n in range(MAX_LINES - 1)])
    kept = read_history(file)
    assert (len(kept), kept[0], kept[-1]) == (MAX_LINES, "b", f"line {MAX_LINES - 2}")
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_two_chats_that_end_at_different_times_both_keep_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    add_to_history(file, ["of the first"])
    add_to_history(file, ["of the second"])
    assert read_history(file) == ["of the first", "of the second"]
    add_to_history(file, [])
    assert len(read_history(file)) == 2


def test_a_history_that_is_no_text_is_read_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    file.write_bytes(b"a\xff\nb\n")
    assert read_history(file) == ["a\ufffd", "b"]
