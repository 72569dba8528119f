"""The compiled pass reads the keys and values ahead that rows will see, each line once.

No function that Python calls returns what is read, so a small program is compiled.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from string import Template

import pytest

from tests.emulated import CSRC

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

SIZE, TOKEN = 16, 128  # tokens of a block, bytes of the keys of a token
PIECE, LINE = 256, 64  # tokens and bytes, as in csrc/
CONTEXTS = (1, 2, 17, 40, 300, 48)
"""Tokens of each row, with the one of this step. The last row is not a decode row."""
DECODES, WIDTH = 5, 19
TABLE = [[(row * WIDTH + block) * 37 % 128 for block in range(WIDTH)] for row in range(6)]
"""Blocks of each row."""
WINDOWS = (0, 1, 5, 18, 100)
LAG = 512

PROGRAM = r"""
#include <cstdio>
#include "key_runs.h"

static char memory[3][1 << 18]; // keys, values, and others

void print(const char *what, const char *at) {
    const bool is_value = at >= memory[1];
    std::printf("%s %s %ld\n", what, is_value ? "value" : "key", (long)(at - memory[is_value]));
}

struct PrintedLines {
    static void prefetch(const char *line) { print("prefetch", line); }
    static void read(const char *line) { print("read", line); }
};

int main() {
    const int64_t contexts[] = {$contexts}, table[] = {$table}, starts[] = {0, 1, 2, 3, 4, 5, 12};
    const Rows rows{starts, contexts, table, $rows, $decodes, $width, $size, nullptr};
    const Work work(rows);
    for (const int64_t window : {$windows})
        for (const int64_t limit : {INT64_MAX, (int64_t)(2 * 4 * 256 * $token)}) {
            const Scoring scoring{1, 0, window, nullptr, 0};
            std::atomic<int64_t> taken{0};
            KeyRuns of_thread[2] = {{memory[0], memory[1], $token, rows, work, scoring, taken},
                                    {memory[0], memory[1], $token, rows, work, scoring, taken}};
            for (KeyRuns &each : of_thread)
                if (limit != INT64_MAX) each.limit(limit);
            const char *is_limited = limit == INT64_MAX ? "all" : "limited";
            std::printf("%s %ld bytes %ld\n", is_limited, (long)window, (long)of_thread[0].bytes());
            RunReader<PrintedLines> reader;
            reader.advance();
            reader.begin(of_thread[0], reader.WHOLE * 5 / 2);
            for (int i = 0; i < 3; i++) reader.advance();
            reader.end();
            reader.advance();
            std::printf("other thread\n");
            reader.begin(of_thread[1], reader.WHOLE * 3 / 2);
            for (int i = 0; i < 5000; i++) reader.advance();
        }
}
"""

Printed = dict[tuple[str, int], list[list[str]]]
"""("all" or "limited", window) -> the words of each line that was printed for them."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    folder: Path = tmp_path_factory.mktemp("program")
    source = Template(PROGRAM).substitute(
        contexts=", ".join(map(str, CONTEXTS)),
        table=", ".join(str(block) for row in TABLE for block in row),
        windows=", ".join(map(str, WINDOWS)),
        rows=len(CONTEXTS),
        decodes=DECODES,
        width=WIDTH,
        size=SIZE,
        token=TOKEN,
    )
    (folder / "runs.cpp").write_text(source)
    options = ["-std=c++17", "-O0", "-w", f"-I{CSRC}"]
    program = folder / "runs"
    subprocess.run(["c++", *options, str(folder / "runs.cpp"), "-o", str(program)], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    of_case: list[list[str]] = []
    cases: Printed = {}
    for words in map(str.split, lines.splitlines()):
        if words[0] in ("all", "limited"):
            of_case = cases.setdefault((words[0], int(words[1])), [])
        of_case.append(words)
    return cases


def seen_tokens(window: int, pieces: int) -> list[tuple[int, int]]:
    """Return the pieces and places in the cache of all tokens that decode rows see, in the order of
    the rows. The token of this step is not in the cache yet."""
    number = 0
    seen = []
    for row in range(DECODES):
        for start in range(0, CONTEXTS[row], PIECE):
            seen += [
                (number, TABLE[row][token // SIZE] * SIZE + token % SIZE)
                for token in range(start, min(start + PIECE, CONTEXTS[row] - 1))
                if (not window or token > CONTEXTS[row] - 1 - window) and number < pieces
            ]
            number += 1
    return seen


def lines_of(what: str, kind: str, words: list[list[str]]) -> list[int]:
    return [
        int(at)
        for did, of, at in (each for each in words if len(each) == 3)
        if (did, of) == (what, kind)
    ]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("limit", "pieces"), [("all", 99), ("limited", 4)])
@pytest.mark.parametrize("kind", ["key", "value"])
def test_each_line_that_a_row_sees_is_prefetched_once(
    window: int, limit: str, pieces: int, kind: str, printed: Printed
) -> None:
    lines = lines_of("prefetch", kind, printed[limit, window])

    expected = [
        place * TOKEN + byte
        for _, place in seen_tokens(window, pieces)
        for byte in range(0, TOKEN, LINE)
    ]
    first = printed[limit, window].index(["other", "thread"])
    of_first = lines_of("prefetch", kind, printed[limit, window][:first])
    assert len(lines) == len(set(lines))
    # The first thread stops inside a piece, whose other lines are prefetched by nobody.
    assert set(lines) <= set(expected)
    assert lines[len(of_first) :] == [at for at in expected if at in set(lines[len(of_first) :])]
    unread = {piece for piece, place in seen_tokens(window, pieces) if place * TOKEN not in lines}
    assert len(unread) <= 1


@pytest.mark.parametrize("window", WINDOWS)
def test_the_first_thread_reads_as_much_as_its_rate_says(window: int, printed: Printed) -> None:
    words = printed["all", window]
    before = words[: words.index(["other", "thread"])]

    num_lines = sum(each[0] == "prefetch" for each in before)
    assert num_lines == min(7, 2 * TOKEN // LINE * len(seen_tokens(window, 99)))  # 3 * 5 / 2


@pytest.mark.parametrize("window", WINDOWS)
def test_a_line_is_read_when_others_were_prefetched_after_it(window: int, printed: Printed) -> None:
    words = printed["all", window]
    other = words[words.index(["other", "thread"]) :]
    prefetched = [each[1:] for each in other if each[0] == "prefetch"]
    read = [each[1:] for each in other if each[0] == "read"]

    assert read == prefetched[: max(0, len(prefetched) - LAG)]
    done = [each[0] for each in other if each[0] in ("prefetch", "read")]
    assert done[:LAG] == ["prefetch"] * min(LAG, len(prefetched))


def test_some_lines_are_read(printed: Printed) -> None:
    assert any(each[0] == "read" for each in printed["all", 0])


@pytest.mark.parametrize("window", WINDOWS)
def test_the_bytes_are_those_of_all_runs(window: int, printed: Printed) -> None:
    told = printed["all", window][0]

    assert told == ["all", str(window), "bytes", str(2 * TOKEN * len(seen_tokens(window, 99)))]
