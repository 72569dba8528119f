"""Step times: the benchmark's parts, the choice of packed or dense weights, idle gaps."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from protocol.config.worker import WorkerConfig
from protocol.tools.bench import PARTS, StepBench
from protocol.worker.steps import WorkerReady
from tests.support.draft_heads import write_with_head
from tests.support.kernels import native_kernels
from tests.support.replica import load
from tests.support.tiny_checkpoint import write_tiny_llama
from worker.attention.select import select_attention
from worker.benchmark.parts import PartsClock, TimedPart
from worker.benchmark.steps import StepBenchmark, worker_config
from worker.kv.cache import KVCache
from worker.layers.linear import Dense
from worker.loading.decoder import load_model
from worker.models.autotune import (
    RowTime,
    dense_from,
    distinct_experts,
    in_words,
    mixture_costs,
    step_costs,
)
from worker.models.autotune_cache import ROWS, row_times
from worker.slots.fields import slot_fields
from worker.slots.table import SlotTable
from worker.step.device_idle import LATEST, DeviceIdle
from worker.step.runner import Runner


def ticking() -> PartsClock:
    """Return a clock on which one second passes between any two readings."""
    return PartsClock(map(float, itertools.count()).__next__)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def config(checkpoint: Path, **changes: object) -> StepBench:
    fields = {"batch": (1, 3), "context": (5, 20), "steps": 3, "warm_up": 1}
    worker = WorkerConfig(model=str(checkpoint), block_tokens=4, threads=1, dtype="float32")
    return msgspec.convert(fields | changes | {"worker": msgspec.to_builtins(worker)}, StepBench)


def benchmark_of(config: StepBench) -> StepBenchmark:
    """Return a benchmark like that of `assemble_benchmark`, which sets the threads of its process
    and so can be called only once."""
    worker, dtype, cpu = worker_config(config), torch.float32, torch.device("cpu")
    loaded = load_model(worker.model, dtype=dtype, device=cpu)
    shape = (loaded.spec.layer_heads[0].count, loaded.spec.layer_heads[0].dim, dtype, cpu)
    cache = KVCache(loaded.spec.num_layers, worker.kv_blocks, worker.block_tokens, *shape)
    fields = slot_fields(worker.max_len, -(-worker.max_len // worker.block_tokens))
    attention = select_attention(worker.block_tokens, dtype=dtype)
    ready = WorkerReady(
        model=loaded.card,
        max_len=worker.max_len,
        max_slots=worker.max_slots,
        token_budget=256,
        block_tokens=worker.block_tokens,
        num_blocks=worker.kv_blocks,
    )
    slots = SlotTable(fields, worker.max_slots, cpu)
    return StepBenchmark(config, Runner(loaded.model, slots, cache, attention), ready)


def test_the_time_of_a_nested_part_does_not_count_for_the_outer_part() -> None:
    clock = ticking()
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.seconds == {"outer": 2.0, "inner": 1.0}


def test_the_time_after_a_call_can_count_for_another_part() -> None:
    clock = ticking()
    head = TimedPart(lambda: "logits", clock, "head", then="sampling")
    with clock.part("overhead"):
        assert head() == "logits"
    assert clock.seconds == {"overhead": 2.0, "head": 1.0, "sampling": 1.0}


def test_a_timed_part_behaves_as_the_wrapped_object() -> None:
    clock = ticking()
    watched = TimedPart([3, 1, 2], clock, "list")
    assert watched.index(1) == 1
    assert watched.__doc__ is not None
    assert clock.seconds == {"list": 1.0}


def test_a_part_that_raises_is_ended() -> None:
    clock = ticking()
    with clock.part("outer"):
        with pytest.raises(ZeroDivisionError), clock.part("inner"):
            raise ZeroDivisionError
        clock.rename_current("rest")
    assert clock.seconds == {"outer": 2.0, "inner": 1.0, "rest": 1.0}


def test_the_cache_has_exactly_the_blocks_of_the_largest_step(checkpoint: Path) -> None:
    worker = worker_config(config(checkpoint, batch=[2, 3], context=[7, 5], new_tokens=2))
    assert (worker.max_slots, worker.max_len) == (3, 10)
    assert worker.kv_blocks == 3 * 3 + 1


@pytest.mark.parametrize("sampling", ["greedy", "nucleus", "penalised"])
@pytest.mark.parametrize("new_tokens", [1, 6])
def test_every_batch_is_timed_with_every_context(
    checkpoint: Path, sampling: str, new_tokens: int
) -> None:
    benchmark = benchmark_of(config(checkpoint, sampling=sampling, new_tokens=new_tokens))
    timings = list(benchmark.run())
    assert [(t.batch, t.context) for t in timings] == [(1, 5), (3, 5), (1, 20), (3, 20)]
    for timing in timings:
        assert timing.new_tokens == new_tokens
        assert 0 < timing.best_s <= timing.step_s <= timing.p90_s
        assert set(timing.parts_s) == set(PARTS)
        assert all(seconds > 0 for seconds in timing.parts_s.values()), timing.parts_s


def test_the_benchmark_restores_the_model(checkpoint: Path) -> None:
    benchmark = benchmark_of(config(checkpoint))
    weights = benchmark.components.model.weights  # type: ignore[attr-defined]
    before = [layer.mixer.qkv for layer in weights.layers]
    benchmark.timing(1, 5)
    assert [layer.mixer.qkv for layer in weights.layers] == before


@pytest.mark.parametrize("changes", [{"batch": []}, {"context": []}, {"batch": [0]}, {"steps": 0}])
def test_an_option_that_cannot_be_timed_is_refused_by_name(
    checkpoint: Path, changes: dict[str, object]
) -> None:
    (name,) = changes
    with pytest.raises(msgspec.ValidationError, match=name):
        config(checkpoint, **changes)


def test_a_bad_config_is_reported_in_one_line_with_code_2() -> None:
    command = [
        sys.executable,
        "-m",
        "worker.benchmark",
        "--config",
        json.dumps({"batch": [1]}),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "worker" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


# ---- packed or dense, by rows
def table(*times: tuple[int, float, float | None]) -> list[RowTime]:
    return [RowTime(*time) for time in times]


CROSSING = table((1, 1, 2), (8, 2, 2.8), (16, 8, 2.8), (32, 16, 4))
PACKED = table((1, 1, 2), (8, 2, 3), (16, 4, 4))
DENSE = table((1, 4, 1), (8, 9, 2))
# A form that wins by little is not chosen, nor one that wins for some rows but not for more.
BARELY = table((1, 1, 0.9), (8, 2, 1.9))
ONCE = table((1, 1, 0.1), (8, 2, 3), (16, 4, 4))
ALONE = table((1, 1, None), (8, 2, None))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (PACKED, "all rows packed"),
        (BARELY, "all rows packed"),
        (ONCE, "all rows packed"),
        (ALONE, "all rows packed"),
        (DENSE, "all rows dense"),
        (CROSSING, "rows 1-11 packed, 12+ dense"),
    ],
)
def test_dense_weights_are_used_from_the_rows_where_they_clearly_win(
    times: list[RowTime], words: str
) -> None:
    """In the CROSSING table, packed weights take 4.25 at 11 rows and 5 at 12. Dense weights take
    2.8 at both, which is at most the fraction CLEARLY of 5, but not of 4.25."""
    assert in_words(times) == words
    assert (dense_from(times) is None) == (words == "all rows packed")


def test_the_cost_of_a_step_is_the_time_of_the_faster_form_in_all_layers() -> None:
    assert step_costs(CROSSING, layers=10) == [(1, 10), (8, 20), (16, 28), (32, 40)]


def test_fewer_rows_never_cost_more() -> None:
    """The time for one row is larger than that for two, because other work disturbed it."""
    times = table((1, 9, None), (2, 3, None), (4, 5, None))
    assert step_costs(times, layers=1) == [(1, 3), (2, 3), (4, 5)]


@pytest.mark.parametrize(("rows", "number"), [(1, 2.0), (2, 3.5), (3, 4.625), (1000, 8.0)])
def test_more_rows_choose_more_experts_until_all_are_chosen(rows: int, number: float) -> None:
    """Each row chooses two of eight."""
    assert distinct_experts(8, 2, rows) == pytest.approx(number)


def test_a_step_with_experts_costs_as_much_as_the_experts_that_it_reads() -> None:
    """Two of ten layers have no experts. A row of an expert takes one second, and each further one
    the hundredth part."""
    expert = table((1, 1, None), (101, 2, None))
    others = table((1, 1, None), (2, 1, None), (400, 3, None))
    costs = mixture_costs(expert, others, num_experts=8, top_k=2, mixtures=8, layers=10)
    first, second, last = (seconds for _, seconds in costs)
    assert first == pytest.approx(10 + 8 * 2)
    assert second == pytest.approx(10 + 8 * 3.5 * (1 + (4 / 3.5 - 1) / 100))
    assert last == pytest.approx(30 + 8 * 8 * (1 + (100 - 1) / 100))


def test_a_mixture_of_experts_is_measured(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "hidden_size": 192,
        "moe_intermediate_size": 384,
        "n_routed_experts": 16,
    }
    write_with_head(tmp_path, "glm4_moe", **changes)
    loaded = load(tmp_path, kernels=native_kernels(), weights="packed")
    assert [rows for rows, _ in loaded.step_costs] == list(ROWS)
    seconds = [cost for _, cost in loaded.step_costs]
    assert seconds[0] > 0
    assert seconds == sorted(seconds)


class CountedLinear(Dense):
    """A linear that counts its calls."""

    def __init__(self) -> None:
        super().__init__(torch.ones(2, 4))
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(x)


def measured(linear: CountedLinear, folder: Path | None, of: str = "this machine") -> list[RowTime]:
    dense, x = Dense(torch.ones(2, 4)), torch.ones(256, 4)
    return row_times([of], [linear], lambda: [dense], [x], folder)


def test_measurements_are_read_from_the_cache(tmp_path: Path) -> None:
    first, again, elsewhere = CountedLinear(), CountedLinear(), CountedLinear()
    times = measured(first, tmp_path / "deep" / "er")
    assert [time.rows for time in times] == list(ROWS)
    assert all(time.packed_s > 0 and (time.dense_s or 0) > 0 for time in times)
    assert measured(again, tmp_path / "deep" / "er") == times
    measured(elsewhere, tmp_path / "deep" / "er", "another machine")
    assert (first.calls > 0, again.calls, elsewhere.calls > 0) == (True, 0, True)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"of":["linears of a step","this machine"],"value":[]}', b"\xff"]
)
def test_a_damaged_file_is_measured_anew_and_written_again(tmp_path: Path, content: bytes) -> None:
    times = measured(CountedLinear(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    anew, last = CountedLinear(), CountedLinear()
    again = measured(anew, tmp_path)
    assert [time.rows for time in again] == [time.rows for time in times]
    assert measured(last, tmp_path) == again
    assert (anew.calls > 0, last.calls) == (True, 0)


def test_without_a_cache_folder_everything_is_measured(tmp_path: Path) -> None:
    taken = tmp_path / "a file"
    taken.touch()
    for folder in (None, taken / "below"):
        assert len(measured(CountedLinear(), folder)) == len(ROWS)


# ---- gaps between steps
def test_a_gap_is_from_the_end_of_a_step_to_the_start_of_the_next():
    idle = DeviceIdle()
    for started, ended in ((1.0, 2.0), (2.5, 3.0), (3.125, 4.0)):
        idle.record(started, ended)
    assert idle.percentile_s(0) == 0.125
    assert idle.percentile_s(100) == 0.5
    assert idle.summary().startswith("3 steps, gaps between them: p10 125.000 ms")


def test_gaps_that_do_not_exist_are_not_reported():
    idle = DeviceIdle()
    assert idle.summary() == "0 steps"
    idle.record(1.0, 2.0)
    assert idle.summary() == "1 step"


def test_a_step_launched_before_the_previous_end_has_no_gap():
    idle = DeviceIdle()
    idle.record(1.0, 3.0)
    idle.record(2.0, 4.0)
    assert idle.percentile_s(100) == 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_fewer_than_two_steps_have_no_gap(num_steps):
    idle = DeviceIdle()
    for _ in range(num_steps):
        idle.record(1.0, 2.0)
    assert idle.percentile_s(50) == 0
    assert idle.num_steps == num_steps


def test_only_the_latest_gaps_are_kept():
    idle = DeviceIdle()
    idle.record(0.0, 0.0)
    idle.record(9.0, 10.0)
    for _ in range(LATEST):
        idle.record(11.0, 10.0)
    assert idle.percentile_s(100) == 1.0
