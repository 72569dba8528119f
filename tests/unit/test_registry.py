"""The walk that finds per-slot tensors outside the slot table, and what it must not mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import worker.sampling.sampler
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.debug.slot_registry import check_registry, rows_for, strays
from worker.sampling.sampler import TokenChoice
from worker.step import Runner

ROWS = 13


def runner_of() -> Runner:
    """It has computed something: what is made at the first step is there."""
    runner = tiny_runner(tiny_slots(ROWS), tiny_cache(20))
    plan = step_plan(bind=[slot_init(2, [1, 2, 3], blocks=[4], params=GREEDY)], zero=[4])
    runner.step(plan)
    runner.step(step_plan(rows=[(2, 0, 3, True)]))
    return runner


def kept() -> torch.Tensor:
    return torch.zeros(ROWS, 2)


def slip_into_a_dict(runner: Any) -> None:
    runner._model.memory = {"last": [kept()]}


def slip_into_the_cache(runner: Any) -> None:
    runner._cache.lengths = kept()


def slip_into_attention_as_numpy(runner: Any) -> None:
    runner._attention.seen = (np.zeros((2, ROWS)),)


def slip_into_a_closure(runner: Any) -> None:
    hidden, project = kept(), runner._model.logits
    runner._model.logits = lambda x: project(x) + hidden.sum()


def slip_into_a_default(runner: Any) -> None:
    def logits(x: torch.Tensor, memory: torch.Tensor = kept()) -> torch.Tensor:  # noqa: B008
        return x

    runner._model.logits = logits


def slip_into_a_partial(runner: Any) -> None:
    runner._model.logits = partial(torch.add, kept())


def slip_into_a_lru_cache(runner: Any) -> None:
    made = lru_cache(kept)
    made()
    runner._model.made = made


def slip_into_a_bound_method(runner: Any) -> None:
    class Holder:
        __slots__ = ("held",)

        def call(self) -> None: ...

    holder: Any = Holder()
    holder.held = kept()
    runner._mark = holder.call


HIDINGS: list[Callable[[Runner], None]] = [
    slip_into_a_dict,
    slip_into_the_cache,
    slip_into_attention_as_numpy,
    slip_into_a_closure,
    slip_into_a_default,
    slip_into_a_partial,
    slip_into_a_lru_cache,
    slip_into_a_bound_method,
]


def test_a_worker_has_none():
    check_registry(runner_of())


@pytest.mark.parametrize("hide", HIDINGS)
def test_a_tensor_that_was_slipped_in_is_found_wherever_it_is_kept(hide):
    runner: Any = runner_of()
    hide(runner)
    assert len(strays(runner)) == 1
    with pytest.raises(RuntimeError, match="outside the slot table"):
        check_registry(runner)


def test_one_in_a_module_or_in_a_class_of_the_worker_is_found(monkeypatch):
    runner: Any = runner_of()
    monkeypatch.setattr(worker.sampling.sampler, "LAST", {1: kept()}, raising=False)
    assert len(strays(runner)) == 1
    monkeypatch.setattr(TokenChoice, "last", kept(), raising=False)
    assert len(strays(runner)) == 2


def test_who_holds_it_is_told():
    runner: Any = runner_of()
    runner._model.memory = {"last": [kept()]}
    (told,) = strays(runner)
    assert told == "(13, 2) torch.float32 held by tests.support.tiny_model.TinyModel"


def test_a_view_of_the_table_is_the_tables():
    runner: Any = runner_of()
    tables = [runner._slots["token_ids"].view(-1), runner._slots["len"].numpy()]
    runner._model.views = [*tables, runner._slots["block_table"][3:].t()]
    assert strays(runner) == []


def test_rows_are_a_number_that_nothing_else_has():
    model: Any = TinyModel(vocab=11, max_len=13)
    model.odd = np.zeros((2, 3, 17))
    assert rows_for(5, [model]) == 19
    assert rows_for(19, [model]) == 19
    assert rows_for(20, [model]) == 23
