"""Reading back what a step computed: there when the step is done, not looked at earlier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import CPU, tiny_cache, tiny_runner, tiny_slots
from worker.batch.readback import Readback
from worker.sampling.logprob_columns import LogprobColumns


class ReadbackPlace:
    """A place in a queue that the test moves up to."""

    is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def test_on_the_cpu_a_copy_is_the_tensor_itself_and_a_step_is_done_at_once():
    readback, tensor = Readback(CPU), torch.arange(3)
    assert readback.copy(tensor) is tensor
    readback.seal()
    assert readback.is_done
    readback.wait()


def test_a_launched_step_is_done_when_its_own_place_is_reached():
    places: list[ReadbackPlace] = []

    def mark(device: torch.device) -> ReadbackPlace:
        places.append(ReadbackPlace())
        return places[-1]

    runner = tiny_runner(tiny_slots(2), tiny_cache(9), mark=mark)
    init = slot_init(0, [4, 5], blocks=[1], params=GREEDY)
    one = runner.launch(step_plan(1, bind=[init], rows=[(0, 0, 2, True)], zero=[1]))
    two = runner.launch(step_plan(2, rows=[(0, 2, 1, True)]))
    assert not one.is_done
    assert one.result().step == 1
    assert one.is_done
    assert not two.is_done, "to read a step waits for no later one"


def columns(**more: Any) -> LogprobColumns:
    return LogprobColumns(
        rows=np.array([0, 2]),
        counts=np.array([2, 0], np.int32),
        possible=torch.tensor([1, 2]),
        ids=torch.tensor([7, 8]),
        logprobs=torch.tensor([-1.0, -2.0]),
        ranks=torch.tensor([1, 5]),
        top_ids=torch.tensor([[7, 3], [4, 6]]),
        top_logprobs=torch.tensor([[-1.0, float("-inf")], [-0.5, -1.0]]),
        **more,
    )


@pytest.mark.parametrize("more", [{}, {"asked": torch.ones(2, 3)}, {"drawn": torch.ones(1, 3)}])
def test_every_tensor_of_the_columns_is_copied_and_nothing_else_changes(more):
    copied = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor + 1

    before = columns(**more)
    after = before.map_tensors(copy)
    assert len(copied) == 6 + len(more)
    assert after.ids.tolist() == [8, 9]
    assert after.rows is before.rows
    assert (after.asked is None) == ("asked" not in more)


def test_columns_are_told_with_no_more_likely_tokens_than_are_possible():
    told = columns().to_message()
    assert told.counts.tolist() == [1, 0]
    assert told.rows.tolist() == [0, 2]
    assert told.top_ids.shape == (2, 2)
    assert told.asked is None
    assert told.drawn_at is None
