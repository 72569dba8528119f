"""An engine's journal: what is written is read, a replay decides the same, a change is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine_core.journal.file import KEPT_FILES, Writer, read
from engine_core.journal.recorder import RecordedEngine
from engine_core.journal.records import AnyRecord, Began, Committed, Full, Planned, Ticked
from engine_core.journal.replay import Differs, NoJournal, replay
from protocol.arrays import Int32
from protocol.errors import WireError
from tests.support.engines import Bench
from tests.support.storm import Storm


class Journals:
    """In a directory of their own; closed at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()

    def write(self, max_bytes: int = 1 << 24) -> Writer:
        return self._stack.enter_context(closing(Writer(self.directory, max_bytes)))

    def of(self, bench: Bench, max_bytes: int = 1 << 24) -> Path:
        """From now on its engine writes one."""
        writer, engine = self.write(max_bytes), bench.engine
        bench.engine = RecordedEngine(writer, engine._config, engine._model, engine.limits)
        return writer.path

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[Journals]:
    with closing(Journals(tmp_path / "journals")) as journals:
        yield journals


def stormy(seed: int, journals: Journals, **more) -> tuple[Bench, Path]:
    storm = Storm(seed)
    path = journals.of(storm.bench, **more)
    for number in range(150):
        storm.bench.engine.tick(number / 8)
        storm.operate()
    storm.settle()
    storm.check()
    return storm.bench, path


@pytest.mark.parametrize("seed", [2, 3, 104, 205])
def test_whatever_came_a_replay_decides_the_same(seed: int, journals: Journals) -> None:
    bench, path = stormy(seed, journals)
    done = replay(read(path), checks=True)
    assert done.stats == bench.engine.stats()
    assert done.kinds["committed"] == done.stats.num_steps > 20
    assert done.kinds["added"] == done.stats.num_accepted + done.stats.num_refused
    assert not done.is_full
    assert done.seconds > 10


def small(journals: Journals) -> tuple[Bench, list[AnyRecord]]:
    bench = Bench()
    path = journals.of(bench)
    bench.add([5, 6, 7], max_tokens=4, ignore_eos=True)
    bench.run()
    return bench, list(read(path))


def test_a_decision_that_changed_is_named_with_its_record(journals: Journals) -> None:
    _, records = small(journals)
    at = next(i for i, record in enumerate(records) if isinstance(record, Planned))
    planned = records[at]
    assert isinstance(planned, Planned)
    records[at] = replace(planned, said=b"12345678", tokens=99)
    with pytest.raises(Differs, match=rf"record {at}.*was step 1 of 1 rows and 99 tokens"):
        replay(records)


def test_another_token_makes_another_answer(journals: Journals) -> None:
    _, records = small(journals)
    at = next(i for i, record in enumerate(records) if isinstance(record, Committed))
    committed = records[at]
    assert isinstance(committed, Committed)
    records[at] = replace(committed, result=replace(committed.result, tokens=Int32.of([1])))
    with pytest.raises(Differs, match="the answer to 'committed'"):
        replay(records)


def test_what_made_an_engine_fail_is_written_and_makes_it_fail_again(
    journals: Journals,
) -> None:
    bench = Bench()
    path = journals.of(bench)
    bench.add([5, 6], ignore_eos=True)
    plan = bench.plan()
    assert plan is not None
    wrong = replace(bench.worker.execute(plan), step=77)
    with pytest.raises(RuntimeError) as first:
        bench.engine.commit(wrong, 0.0)
    with pytest.raises(RuntimeError) as second:
        replay(read(path))
    assert str(first.value) == str(second.value)


def test_a_journal_that_was_cut_anywhere_is_read_up_to_its_last_whole_record(
    journals: Journals,
    tmp_path: Path,
) -> None:
    _, records = small(journals)
    (path,) = journals.directory.iterdir()
    data = path.read_bytes()
    cut = tmp_path / "cut"
    lengths = []
    for end in chain(range(0, len(data), 61), [len(data)]):
        cut.write_bytes(data[:end])
        found = list(read(cut))
        assert found == records[: len(found)]
        lengths.append(len(found))
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, len(records))


def test_a_full_journal_says_so_and_the_engine_goes_on(journals: Journals) -> None:
    bench, path = stormy(2, journals, max_bytes=8000)
    *_, last = read(path)
    assert isinstance(last, Full)
    assert path.stat().st_size < 8100
    assert replay(read(path)).is_full
    assert bench.engine.is_idle


def test_an_idle_engines_clock_is_written_when_it_matters(journals: Journals) -> None:
    bench = Bench()
    path = journals.of(bench)
    for now in range(100):
        bench.engine.tick(float(now))
    bench.add([5, 6], max_tokens=1, ignore_eos=True)
    kinds = [record for record in read(path) if not isinstance(record, Began)]
    assert [record for record in kinds if isinstance(record, Ticked)] == [Ticked(now=99.0)]


def test_it_is_its_owners_alone_and_the_oldest_ones_go(journals: Journals, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only its owner"):
        Writer(tmp_path / "open", 1000)
    directory = journals.directory
    directory.mkdir(mode=0o700)
    for day in range(1, 8):
        (directory / f"engine-2020010{day}-000000-1.journal").write_bytes(b"")
    (directory / "notes").write_text("not ours")
    writer = journals.write(1000)
    assert writer.path.stat().st_mode & 0o777 == 0o600
    names = sorted(path.name for path in directory.glob("*.journal"))
    assert len(names) == KEPT_FILES
    assert names[0] == "engine-20200105-000000-1.journal"
    assert (directory / "notes").exists()


@pytest.mark.parametrize("data", [b"\xff" * 50, b"\x01\0\0\0\x03\0\0\0abc", b"#!/bin/sh\n" * 9])
def test_what_is_no_journal_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises((WireError, NoJournal)):
        replay(read(tmp_path / "file"))


def test_nothing_is_no_journal() -> None:
    with pytest.raises(NoJournal):
        replay([])
