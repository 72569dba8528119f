"""The runs of memory that the compiled pass reads ahead are the keys and values that rows will see.

No function that Python calls returns them, so a small program is compiled.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from string import Template

import pytest

from tests.emulated import CSRC

SIZE, TOKEN = 16, 96  # tokens of a block, bytes of the keys of a token
CONTEXTS = (1, 2, 17, 40, 33, 48)
"""Tokens of each row, with the one of this step. The last row is not a decode row."""
DECODES, WIDTH = 5, 3
TABLE = [[7, 0, 0], [3, 0, 0], [11, 2, 0], [5, 14, 9], [1, 8, 13], [4, 6, 10]]
"""Blocks of each row. Zeros are not used."""
WINDOWS = (0, 1, 5, 18, 100)

PROGRAM = r"""
#include <cstdio>
#include "key_runs.h"

int main() {
    const int64_t contexts[] = {$contexts}, table[] = {$table};
    const Rows rows{nullptr, contexts, table, $rows, $decodes, $width, $size, nullptr};
    static char memory[3][1 << 16];
    for (const int64_t window : {$windows}) {
        const Scoring scoring{1, 0, window, nullptr, 0};
        std::atomic<int64_t> taken{0};
        KeyRuns of_thread[2] = {{memory[0], memory[1], $token, rows, scoring, &taken},
                                {memory[0], memory[1], $token, rows, scoring, &taken}};
        std::printf("%ld all %ld\n", (long)window, (long)of_thread[0].bytes());
        MemoryRun run;
        for (int i = 0; of_thread[i % 2].next(run); i++) {
            const bool is_value = run.first >= memory[1] && run.first < memory[2];
            std::printf("%ld %s %ld %ld\n", (long)window, is_value ? "value" : "key",
                        (long)(run.first - memory[is_value]), (long)run.bytes);
        }
        // A reader asks for all runs, and then for no more.
        taken = 0;
        ReadAhead reader;
        reader.advance();
        reader.begin(of_thread[0], 3);
        for (int i = 0; i < 1000; i++) reader.advance();
        std::printf("%ld taken %ld\n", (long)window, (long)taken);
    }
}
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return the words of each line that the program prints."""
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
    return [line.split() for line in lines.splitlines()]


def seen_tokens(window: int) -> list[int]:
    """Return the places in the cache of all tokens that decode rows see, in the order of the rows.
    The token of this step is not in the cache yet."""
    return [
        TABLE[row][token // SIZE] * SIZE + token % SIZE
        for row in range(DECODES)
        for token in range(CONTEXTS[row] - 1)
        if not window or token > CONTEXTS[row] - 1 - window
    ]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["key", "value"])
def test_each_token_that_a_row_sees_is_read_once(
    window: int, kind: str, printed: list[list[str]]
) -> None:
    runs = [
        (int(first), int(size))
        for at, what, first, size in (words for words in printed if len(words) == 4)
        if at == str(window) and what == kind
    ]

    tokens = [(first + i) // TOKEN for first, size in runs for i in range(0, size, TOKEN)]
    assert tokens == seen_tokens(window)
    assert all(first % TOKEN == size % TOKEN == 0 for first, size in runs)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_bytes_are_those_of_all_runs(window: int, printed: list[list[str]]) -> None:
    told = [int(words[2]) for words in printed if words[:2] == [str(window), "all"]]

    assert told == [2 * TOKEN * len(seen_tokens(window))]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_reader_stops_after_the_last_run(window: int, printed: list[list[str]]) -> None:
    taken = [int(words[2]) for words in printed if words[:2] == [str(window), "taken"]]

    assert taken == [2 * DECODES * WIDTH + 1]
