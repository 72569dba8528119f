"""An engine's journal: what is written is read, a replay decides the same, a change is found."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine_core.grammar.matcher import Matcher
from engine_core.journal.file import KEPT_FILES, Writer, read
from engine_core.journal.recorder import RecordedEngine
from engine_core.journal.records import AnyRecord, Began, CommitRecord, PlanRecord, Ticked
from engine_core.journal.replay import NoJournal, ReplayDiffers, replay
from engine_core.journal.state import FrozenObject, StateError, freeze, thaw
from protocol.arrays import Int32
from protocol.errors import WireError
from protocol.grammar import ChoiceGrammar, Regex
from tests.support.engines import Bench
from tests.support.grammars import text_of
from tests.support.storm import Forgetful, RequestStorm


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
        tiers = list(bench.tiers.kept)
        bench.engine = RecordedEngine(
            writer, engine._config, engine._model, engine.limits, tiers=tiers
        )
        return writer.path

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[Journals]:
    with closing(Journals(tmp_path / "journals")) as journals:
        yield journals


def stormy(
    seed: int, journals: Journals, length: int = 150, tiers: Sequence[str] = ()
) -> tuple[Bench, Path]:
    storm = Forgetful(seed, [*tiers]) if tiers else RequestStorm(seed)
    path = journals.of(storm.bench)
    for number in range(length):
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
    at = next(i for i, record in enumerate(records) if isinstance(record, PlanRecord))
    planned = records[at]
    assert isinstance(planned, PlanRecord)
    records[at] = replace(planned, reply_digest=b"12345678", tokens=99)
    with pytest.raises(ReplayDiffers, match=rf"record {at}.*was step 1 of 1 rows and 99 tokens"):
        replay(records)


def test_another_token_makes_another_answer(journals: Journals) -> None:
    _, records = small(journals)
    at = next(i for i, record in enumerate(records) if isinstance(record, CommitRecord))
    committed = records[at]
    assert isinstance(committed, CommitRecord)
    other = 2 if committed.result.tokens.tolist() == [1] else 1  # seeds are drawn: it may be any
    records[at] = replace(committed, result=replace(committed.result, tokens=Int32.of([other])))
    with pytest.raises(ReplayDiffers, match="the reply to 'committed'"):
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


def parts(journals: Journals) -> list[Path]:
    return sorted(journals.directory.glob("*.journal"))


@pytest.mark.parametrize(
    ("seed", "tiers"), [(2, []), (3, []), (104, []), (205, []), (207, ["host", "disk"])]
)
def test_a_part_may_begin_at_any_moment_and_replays_by_itself(
    seed: int, tiers: list[str], journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is open then: answers in grammars, drafts, steps that are out, fetches."""
    monkeypatch.setattr("engine_core.journal.file.KEPT_FILES", 1000)
    monkeypatch.setattr("engine_core.journal.file.SPARE", 1)  # a file is nearly full at once
    bench, _ = stormy(seed, journals, length=60, tiers=tiers)
    told = [replay(read(path), checks=True) for path in parts(journals)]
    assert [done.began.part for done in told] == list(range(1, 62))
    assert sum(done.kinds["committed"] for done in told) == told[-1].stats.num_steps > 5
    assert told[-1].stats == bench.engine.stats()


def test_an_answer_is_where_it_was_in_its_grammar(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.journal.file.KEPT_FILES", 1000)
    monkeypatch.setattr("engine_core.journal.file.SPARE", 1)
    bench = Bench(steps_in_flight=2)
    journals.of(bench)
    number = bench.add([5, 6, 7], grammar=ChoiceGrammar(choices=["abcdefgh", "abcdxyzw"]))
    bench.compile()
    waits = bench.add([5, 6, 7], grammar=Regex(pattern="[ab]{9}c"))  # compiled when it is half done
    for now in range(1, 9):
        bench.engine.tick(float(now))
        bench.step()
    bench.compile()
    for now in range(9, 30):
        bench.engine.tick(float(now))
        bench.step()
    assert isinstance(number, int)
    assert isinstance(waits, int)
    assert text_of(bench.tokens(number)) in ("abcdefgh", "abcdxyzw")
    assert text_of(bench.tokens(waits)).endswith("c")
    masked = [replay(read(path), checks=True).kinds["masked"] for path in parts(journals)]
    assert sum(map(bool, masked)) > 15, "parts begin in the middle of answers"


def busy(bench: Bench, now: float) -> None:
    """One more second of its life; it is never idle."""
    bench.engine.tick(now)
    bench.add([int(now) % 50, 6, 7], max_tokens=9, seed=int(now))
    for _ in range(8):
        bench.step()


def test_a_long_life_is_bounded_the_oldest_part_goes_and_the_rest_replays(
    journals: Journals,
) -> None:
    bench = Bench(checks=False)
    first = journals.of(bench, 1 << 15)
    for now in range(400):
        busy(bench, float(now))
    assert not bench.engine.is_idle
    found = parts(journals)
    assert len(found) == KEPT_FILES
    assert not first.exists()
    assert all(path.stat().st_size <= 1 << 15 for path in found)
    told = [replay(read(path)) for path in found]
    assert [done.began.part for done in told] == [
        *range(told[0].began.part, told[-1].began.part + 1)
    ]
    assert not any(done.is_full for done in told)
    assert told[-1].stats == bench.engine.stats()


def test_what_one_turn_brings_may_fill_a_file_and_the_next_turn_begins_another(
    journals: Journals,
) -> None:
    bench = Bench(checks=False)
    path = journals.of(bench, 1 << 17)
    numbers = [bench.add(list(range(50)), max_tokens=1) for _ in range(800)]
    assert replay(read(path)).is_full
    assert path.stat().st_size < (1 << 17) + 100
    bench.abort(*[number for number in numbers if isinstance(number, int)])
    busy(bench, 1.0)
    (_, second) = parts(journals)
    assert replay(read(second)).stats == bench.engine.stats()


def test_an_engine_that_knows_more_than_half_a_file_goes_on_without_a_journal(
    journals: Journals,
) -> None:
    bench = Bench(checks=False)
    journals.of(bench, 1 << 13)
    for now in range(200):
        busy(bench, float(now))
    first, second = parts(journals)
    assert replay(read(first)).began.part == 1
    assert second.stat().st_size <= (1 << 13) + 100


def test_a_part_of_an_engine_that_consisted_of_something_else_is_refused(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.journal.file.SPARE", 1)
    bench = Bench()
    journals.of(bench)
    vars(bench.engine._scheduler)["of_old"] = 1
    bench.engine.tick(1.0)
    with pytest.raises(NoJournal, match="Scheduler differ: of_old"):
        replay(read(parts(journals)[-1]))


def test_a_state_names_no_class_but_ours_and_calls_none() -> None:
    for name in ("subprocess:Popen", "engine_core.engine:secrets", "engine_core.nowhere:Engine"):
        with pytest.raises(StateError):
            thaw(FrozenObject([["object", name, {}, []]]), str, lambda digest: Matcher(None))
    with pytest.raises(StateError, match="subprocess:list2cmdline"):
        freeze([subprocess.list2cmdline], {})


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
