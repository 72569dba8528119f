"""The journal of an engine: a replay gives the same replies, and finds any difference."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from engine_core.adapters import AdapterCommand
from engine_core.journal.file import KEPT_FILES, Writer, read
from engine_core.journal.recorder import RecordedEngine
from engine_core.journal.records import (
    FORMAT,
    AnyRecord,
    CommitEncodedRecord,
    CommitRecord,
    PlanRecord,
    SnapshotRecord,
    StartRecord,
    TickRecord,
)
from engine_core.journal.replay import NoJournal, ReplayDiffers, replay
from engine_core.journal.weights import StepComparison
from protocol.engine.attachments import AttachedTensor
from protocol.engine.grammar import ChoiceGrammar, Regex
from protocol.wire.arrays import Float32, Int32, UInt8
from protocol.wire.errors import WireError
from protocol.worker.steps import (
    AdapterLoad,
    AdapterUnload,
    EncodePlan,
    EncodeResult,
    Masks,
    StepPlan,
    StepResult,
)
from tests.support.engines import CLIENT, Bench, EchoWorker, SampleToken, a_card
from tests.support.grammars import text_of
from tests.support.processes import ROOT
from tests.support.storm import (
    AdapterStorm,
    EncodeStorm,
    RequestStorm,
    SmallCacheStorm,
    StateStorm,
)
from tests.support.timelines import TimedBench


class Journals:
    """Journals in one directory, which are closed at the end of the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()

    def writer(self, max_bytes: int = 1 << 24) -> Writer:
        return self._stack.enter_context(closing(Writer(self.directory, max_bytes)))

    def record(self, bench: Bench, max_bytes: int = 1 << 24) -> Path:
        """Replace the bench's engine by one that writes a journal. Return the path of its file."""
        writer, engine = self.writer(max_bytes), bench.engine
        bench.engine = RecordedEngine(
            writer,
            bench.config,
            a_card(),
            engine.limits,
            tiers=list(bench.tiers.kept),
            adapters=engine.adapters.infos,
        )
        return writer.path

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[Journals]:
    with closing(Journals(tmp_path / "journals")) as journals:
        yield journals


SLOW = b"slow"
"""A client that reads no results until it is told to."""
ADAPTED = (5, 109)
"""Seeds of storms with LoRA adapters."""
STATEFUL = (9, 207)
"""Seeds of storms of a model with a recurrent state."""


def stormy(
    seed: int, journals: Journals, length: int = 150, tiers: Sequence[str] = ()
) -> tuple[Bench, Path]:
    if tiers:
        storm: RequestStorm = SmallCacheStorm(seed, [*tiers])
    elif seed in STATEFUL:
        storm = StateStorm(seed)
    else:
        storm = AdapterStorm(seed) if seed in ADAPTED else RequestStorm(seed)
    return recorded(storm, journals, length)


def recorded(storm: RequestStorm, journals: Journals, length: int) -> tuple[Bench, Path]:
    """Record the operations of a storm, and all answers to it."""
    path = journals.record(storm.bench)
    for number in range(length):
        storm.bench.engine.tick(number / 8)
        storm.operate()
    storm.finish_all()
    storm.check()
    return storm.bench, path


class EchoComparer:
    """Computes the steps of a replay again with an echo worker, and compares the results."""

    def __init__(self, sample: SampleToken, guess: SampleToken) -> None:
        self.comparison = StepComparison()
        self._functions = sample, guess
        self._steps: deque[tuple[StepPlan | EncodePlan, Masks | None]] = deque()
        self._worker: EchoWorker | None = None

    def start(self, record: StartRecord) -> None:
        self._worker = EchoWorker(record.limits, *self._functions)

    def send(self, message: StepPlan | EncodePlan | Masks | AdapterCommand) -> None:
        if isinstance(message, AdapterLoad | AdapterUnload):
            return
        if isinstance(message, StepPlan | EncodePlan):
            self._steps.append((message, None))
        else:
            (number,) = [i for i, (plan, _) in enumerate(self._steps) if plan.step == message.step]
            self._steps[number] = self._steps[number][0], message

    def compare(self, recorded: StepResult | EncodeResult, where: str) -> None:
        assert self._worker is not None
        plan, masks = self._steps.popleft()
        if isinstance(recorded, EncodeResult) and isinstance(plan, EncodePlan):
            self.comparison.add_encoded(recorded, self._worker.encode(plan), where)
        elif isinstance(recorded, StepResult) and isinstance(plan, StepPlan):
            self.comparison.add(recorded, self._worker.execute(plan, masks), where)
        else:
            raise AssertionError("results of another kind than the plan")


@pytest.mark.parametrize("seed", [2, 3, *ADAPTED, *STATEFUL, 104, 205])
def test_a_replay_gives_the_same_replies_and_steps_for_any_input(
    seed: int, journals: Journals
) -> None:
    bench, path = stormy(seed, journals)
    comparer = EchoComparer(bench.worker.sample, bench.worker.guess)
    report = replay(read(path), checks=True, worker=comparer)
    assert comparer.comparison.is_same, comparer.comparison.first_difference
    assert comparer.comparison.num_steps == report.stats.num_steps
    assert report.stats == bench.engine.stats()
    assert report.kinds["committed"] == report.stats.num_steps > 20
    assert report.kinds["added"] == report.stats.num_accepted + report.stats.num_refused
    assert not report.is_full
    assert report.seconds > 10


@pytest.mark.parametrize("seed", [2, 3, 104])
def test_a_replay_encodes_the_same_inputs(seed: int, journals: Journals) -> None:
    bench, path = recorded(EncodeStorm(seed), journals, 150)
    comparer = EchoComparer(bench.worker.sample, bench.worker.guess)
    report = replay(read(path), checks=True, worker=comparer)
    assert comparer.comparison.is_same, comparer.comparison.first_difference
    assert comparer.comparison.num_vectors == comparer.comparison.num_equal_vectors > 20
    assert report.stats == bench.engine.stats()
    assert report.kinds["addedencode"] > 10 < report.kinds["committedencode"]
    assert report.kinds["poppedresults"] > 5


def test_a_file_started_while_inputs_are_encoded_replays_by_itself(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.journal.file.KEPT_FILES", 1000)
    monkeypatch.setattr("engine_core.journal.file.SPARE_DIVISOR", 1)
    bench, _ = recorded(EncodeStorm(5), journals, 60)
    reports = [replay(read(path), checks=True) for path in parts(journals)]
    assert sum(report.kinds["committedencode"] for report in reports) > 5
    assert reports[-1].stats == bench.engine.stats()


def test_a_changed_vector_changes_the_reply(journals: Journals) -> None:
    bench = Bench()
    path = journals.record(bench)
    bench.encode([5, 6, 7])
    bench.run()
    records = list(read(path))
    at = next(i for i, record in enumerate(records) if isinstance(record, CommitEncodedRecord))
    found = records[at]
    assert isinstance(found, CommitEncodedRecord)
    other = Float32.of([1.0, 2.0, 3.0], (1, 3))
    records[at] = replace(found, result=replace(found.result, vectors=other))
    with pytest.raises(ReplayDiffers, match="the reply to 'poppedresults'"):
        replay(records)


def small(journals: Journals) -> tuple[Bench, list[AnyRecord]]:
    bench = Bench()
    path = journals.record(bench)
    bench.add([5, 6, 7], max_tokens=4, ignore_eos=True)
    bench.run()
    return bench, list(read(path))


def test_a_changed_plan_is_reported_with_its_record(journals: Journals) -> None:
    _, records = small(journals)
    at = next(i for i, record in enumerate(records) if isinstance(record, PlanRecord))
    planned = records[at]
    assert isinstance(planned, PlanRecord)
    records[at] = replace(planned, reply_digest=b"12345678", tokens=99)
    with pytest.raises(ReplayDiffers, match=rf"record {at}.*was step 1 of 1 rows and 99 tokens"):
        replay(records)


def test_a_changed_token_changes_the_reply(journals: Journals) -> None:
    _, records = small(journals)
    at = next(i for i, record in enumerate(records) if isinstance(record, CommitRecord))
    committed = records[at]
    assert isinstance(committed, CommitRecord)
    other = (
        2 if committed.result.tokens.tolist() == [1] else 1
    )  # the seed is random, so it may be any token
    records[at] = replace(committed, result=replace(committed.result, tokens=Int32.of([other])))
    with pytest.raises(ReplayDiffers, match="the reply to 'committed'"):
        replay(records)


def test_a_replay_of_the_input_that_made_an_engine_fail_fails_too(journals: Journals) -> None:
    bench = Bench()
    path = journals.record(bench)
    bench.add([5, 6], ignore_eos=True)
    plan = bench.plan()
    assert isinstance(plan, StepPlan)
    wrong = replace(bench.worker.execute(plan), step=77)
    with pytest.raises(RuntimeError) as first:
        bench.engine.commit(wrong, 0.0)
    with pytest.raises(RuntimeError) as second:
        replay(read(path))
    assert str(first.value) == str(second.value)


def test_a_cut_journal_is_read_up_to_its_last_whole_record(
    journals: Journals, tmp_path: Path
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
    ("seed", "tiers"), [(2, []), (3, []), (9, []), (104, []), (205, []), (207, ["host", "disk"])]
)
def test_a_file_started_at_any_moment_replays_by_itself(
    seed: int, tiers: list[str], journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the moments have constrained answers, drafts, steps in flight, fetches or
    checkpoints."""
    monkeypatch.setattr("engine_core.journal.file.KEPT_FILES", 1000)
    # A file is nearly full at once, so each turn starts another.
    monkeypatch.setattr("engine_core.journal.file.SPARE_DIVISOR", 1)
    bench, _ = stormy(seed, journals, length=60, tiers=tiers)
    reports = [replay(read(path), checks=True) for path in parts(journals)]
    assert [report.start.part for report in reports] == list(range(1, 62))
    assert sum(report.kinds["committed"] for report in reports) == reports[-1].stats.num_steps > 5
    assert reports[-1].stats == bench.engine.stats()


def test_a_restored_answer_keeps_its_place_in_the_grammar(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.journal.file.KEPT_FILES", 1000)
    monkeypatch.setattr("engine_core.journal.file.SPARE_DIVISOR", 1)
    bench = Bench(steps_in_flight=2)
    journals.record(bench)
    number = bench.add([5, 6, 7], grammar=ChoiceGrammar(choices=["abcdefgh", "abcdxyzw"]))
    bench.compile()
    waits = bench.add([5, 6, 7], grammar=Regex(pattern="[ab]{9}c"))  # compiled later
    for now in range(1, 9):
        bench.engine.tick(float(now))
        bench.step()
    bench.compile()
    for now in range(9, 30):
        bench.engine.tick(float(now))
        bench.step()
    assert text_of(bench.tokens(number)) in ("abcdefgh", "abcdxyzw")
    assert text_of(bench.tokens(waits)).endswith("c")
    masked = [replay(read(path), checks=True).kinds["masked"] for path in parts(journals)]
    assert sum(map(bool, masked)) > 15, "files start in the middle of answers"


def busy(bench: Bench, now: float) -> None:
    """Run the engine for one more second, with one more request, so that it is never idle."""
    bench.engine.tick(now)
    bench.add([int(now) % 50, 6, 7], max_tokens=9, seed=int(now))
    for _ in range(8):
        bench.step()


def test_only_the_newest_files_are_kept_and_they_replay(
    journals: Journals,
) -> None:
    bench = Bench(checks=False)
    first = journals.record(bench, 1 << 15)
    for now in range(400):
        busy(bench, float(now))
    assert not bench.engine.is_idle
    found = parts(journals)
    assert len(found) == KEPT_FILES
    assert not first.exists()
    assert all(path.stat().st_size <= 1 << 15 for path in found)
    reports = [replay(read(path)) for path in found]
    numbers = [report.start.part for report in reports]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert not any(report.is_full for report in reports)
    assert reports[-1].stats == bench.engine.stats()


def test_a_recorded_engine_shows_the_reason_of_an_abort(journals: Journals) -> None:
    bench = TimedBench()
    path = journals.record(bench)
    number = bench.add([1, 2], labels=["r"])
    bench.engine.abort(CLIENT, [number], "disconnected")
    assert bench.timeline("r").abort_reason == "disconnected"
    assert replay(read(path)).stats == bench.engine.stats()


def test_a_full_journal_file_is_followed_by_another_at_the_next_turn(journals: Journals) -> None:
    bench = Bench(checks=False)
    path = journals.record(bench, 1 << 17)
    numbers = [bench.add(list(range(50)), max_tokens=1) for _ in range(800)]
    assert replay(read(path)).is_full
    assert path.stat().st_size < (1 << 17) + 100
    bench.abort(*numbers)
    busy(bench, 1.0)
    (_, second) = parts(journals)
    assert replay(read(second)).stats == bench.engine.stats()


def test_an_engine_whose_snapshot_exceeds_half_a_file_continues_without_a_journal(
    journals: Journals,
) -> None:
    bench = Bench(checks=False)
    journals.record(bench, 1 << 13)
    for now in range(200):
        busy(bench, float(now))
    first, second = parts(journals)
    assert replay(read(first)).start.part == 1
    assert second.stat().st_size <= (1 << 13) + 100


def test_a_journal_outlives_results_that_wait_for_a_slow_reader(
    journals: Journals, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot with the results would exceed half a file, so the next file waits for them."""
    bench = Bench(checks=False, token_budget=256, max_waiting_tokens=1 << 16)
    bench.not_reading.add(SLOW)
    first = journals.record(bench, 1 << 16)
    number = bench.encode(*[[1]] * 2000, client=SLOW)
    bench.run()
    assert len(bench.engine.encoding.unsent) == 1
    for now in range(200):
        busy(bench, float(now))
    assert parts(journals) == [first]
    assert replay(read(first)).is_full
    assert "the records until its next file are missing" in caplog.text
    bench.read(SLOW)
    assert bench.last_output(number, SLOW).finish == "stop"
    busy(bench, 200.0)
    _, second = parts(journals)
    assert replay(read(second)).stats == bench.engine.stats()


def second_part(journals: Journals, monkeypatch: pytest.MonkeyPatch) -> list[AnyRecord]:
    """Return the records of a file that starts with a snapshot of one open request."""
    monkeypatch.setattr("engine_core.journal.file.SPARE_DIVISOR", 1)
    bench = Bench()
    journals.record(bench)
    bench.add([5, 6, 7], max_tokens=4)
    bench.engine.tick(1.0)
    return list(read(parts(journals)[-1]))


@pytest.mark.parametrize("part", ["the engine", "its scheduler"])
def test_a_snapshot_of_an_engine_with_another_attribute_is_refused(
    part: str, journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = second_part(journals, monkeypatch)[1]
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
    changed = data["snapshot"] if part == "the engine" else data["snapshot"]["scheduler"]
    changed["removed_field"] = 1
    with pytest.raises(msgspec.ValidationError, match="unknown field `removed_field`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=SnapshotRecord)


def test_an_inconsistent_snapshot_is_refused(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, state, *rest = second_part(journals, monkeypatch)
    assert isinstance(state, SnapshotRecord)
    replay([start, state, *rest])
    wrong = replace(state.snapshot, ended_in_flight=[7])
    with pytest.raises(NoJournal, match="the snapshot in this journal is damaged"):
        replay([start, replace(state, snapshot=wrong), *rest])


def test_a_journal_of_another_format_is_refused(journals: Journals) -> None:
    _, (start, *rest) = small(journals)
    assert isinstance(start, StartRecord)
    with pytest.raises(NoJournal, match=f"has format 2; this release reads {FORMAT}"):
        replay([replace(start, format=2), *rest])


def test_an_idle_engine_records_its_last_tick_before_the_next_request(journals: Journals) -> None:
    bench = Bench()
    path = journals.record(bench)
    for now in range(100):
        bench.engine.tick(float(now))
    bench.add([5, 6], max_tokens=1, ignore_eos=True)
    kinds = [record for record in read(path) if not isinstance(record, StartRecord)]
    assert [record for record in kinds if isinstance(record, TickRecord)] == [TickRecord(now=99.0)]


def test_a_journal_is_private_and_the_oldest_files_are_deleted(
    journals: Journals, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only its owner"):
        Writer(tmp_path / "open", 1000)
    directory = journals.directory
    directory.mkdir(mode=0o700)
    for day in range(1, 8):
        (directory / f"engine-2020010{day}-000000-1.journal").write_bytes(b"")
    (directory / "notes").write_text("not ours")
    writer = journals.writer(1000)
    assert writer.path.stat().st_mode & 0o777 == 0o600
    names = sorted(path.name for path in directory.glob("*.journal"))
    assert len(names) == KEPT_FILES
    assert names[0] == "engine-20200105-000000-1.journal"
    assert (directory / "notes").exists()


def test_a_journal_has_no_byte_of_an_image(journals: Journals) -> None:
    pixels = b"the pixels of an image"
    tensor = AttachedTensor(
        name="pixel_values", dtype="bool", shape=[len(pixels)], data=UInt8(pixels)
    )
    bench = Bench(image_rows=64)
    path = journals.record(bench, 1 << 14)
    for number in range(100):  # several files, each with a snapshot
        bench.engine.attach(f"{number % 10:064x}", [tensor], len(pixels))
        bench.engine.tick(float(number))
        bench.add([5, 6], max_tokens=8, ignore_eos=True)
        bench.run()
    journals.close()
    files = [*path.parent.glob("*.journal")]
    assert len(files) > 1
    data = b"".join(file.read_bytes() for file in files)
    assert f"{9:064x}".encode() in data
    assert pixels not in data


@pytest.mark.parametrize("data", [b"\xff" * 50, b"\x01\0\0\0\x03\0\0\0abc", b"#!/bin/sh\n" * 9])
def test_a_file_that_is_not_a_journal_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises((WireError, NoJournal)):
        replay(read(tmp_path / "file"))


def test_an_empty_journal_is_refused() -> None:
    with pytest.raises(NoJournal):
        replay([])


DEEP = """
import sys
from pathlib import Path
from engine_core.grammar import large_stack
from engine_core.admission.grammar_cache import CompiledGrammar
from engine_core.journal.file import Writer, read
from engine_core.journal.recorder import RecordedEngine
from engine_core.journal.replay import replay
from protocol.wire.arrays import Float32, Int32
from protocol.engine.grammar import Grammar, Lark
from protocol.engine.attachments import AttachedTensor
from protocol.engine.messages import Generate
from protocol.engine.sampling import SamplingParams
from tests.support.engines import Bench, a_card, echo_compiler

rules = "start: r0\\n" + "".join(f"r{n}:r{n + 1}\\n" for n in range(4_500)) + 'r4500: "a"'
bench = Bench()
writer = Writer(Path(sys.argv[1]), 1 << 24)
engine = RecordedEngine(writer, bench.config, a_card(), bench.engine.limits)
fields = {"prompt": Int32.of([1]), "params": SamplingParams()}
engine.add(b"client", Generate(request=1, grammar=Grammar(body=Lark(text=rules)), **fields))
(job,) = engine.drain_compile_jobs()
template = large_stack.call(lambda: echo_compiler().compile(job.grammar))
engine.on_grammar_compiled(CompiledGrammar(job.digest, template))
print(replay(read(writer.path)).kinds["settled"])
"""


def test_a_replay_compiles_deep_grammars_on_a_large_stack(tmp_path: Path) -> None:
    """The replay runs in another process, because a stack overflow would end it."""
    command = [sys.executable, "-c", DEEP, str(tmp_path / "journals")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr
