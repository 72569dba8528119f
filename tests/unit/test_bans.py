"""Masks: the tokens a grammar leaves, as the engine tells them, applied to the sampled rows."""

from __future__ import annotations

import random

import pytest
import torch

from protocol.arrays import Int32
from protocol.sampling import SamplingParams
from protocol.steps import Masks
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.sampled_rows import Asker, asking
from tests.support.tiny_model import CPU, VOCAB, tiny_cache, tiny_runner, tiny_slots
from worker.batch.batch import read_rows
from worker.sampling.bans import RowMasks, apply_masks, row_masks
from worker.sampling.logits import process_logits


def bits_of(tokens: set[int], vocab: int) -> list[int]:
    """The words of a mask, as signed 32-bit numbers."""
    words = [0] * -(-vocab // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return [word - (1 << 32) if word >> 31 else word for word in words]


def masks_of(step: int, rows: list[set[int]], vocab: int = VOCAB) -> Masks:
    words = [word for tokens in rows for word in bits_of(tokens, vocab)]
    return Masks(step=step, bits=Int32.of(words, (len(rows), -(-vocab // 32))))


@pytest.mark.parametrize("vocab", [7, 31, 32, 33, 97, 49_152, 151_936])
def test_bits_are_tokens_in_order(vocab):
    tokens = set(random.Random(vocab).sample(range(vocab), vocab // 3)) | {0, vocab - 1}
    plan = step_plan(3, rows=[(0, 0, 1, True)], masked=[0])
    logits = torch.randn(1, vocab)
    apply_masks(logits, row_masks(plan, read_rows(plan), masks_of(3, [tokens], vocab), vocab, CPU))
    assert set(logits[0].isfinite().nonzero().flatten().tolist()) == tokens


def test_only_masked_rows_change_and_only_where_their_mask_says_no():
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    plan = step_plan(3, rows=[(n, 0, 1, True) for n in range(4)], masked=[1, 3])
    allowed = [{0, 5, 96}, {31, 32}]
    apply_masks(logits, row_masks(plan, read_rows(plan), masks_of(3, allowed), VOCAB, CPU))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, tokens in zip((1, 3), allowed, strict=True):
        left = logits[row].isfinite().nonzero().flatten().tolist()
        assert left == sorted(tokens)
        assert torch.equal(logits[row, left], before[row, left])


def test_a_mask_comes_after_all_that_parameters_ask_for():
    params = SamplingParams(logit_bias={5: 100.0, 6: 1.0}, allowed_token_ids=[5, 6, 7])
    logits = torch.zeros(2, VOCAB)
    masks = RowMasks(torch.tensor([1]), torch.tensor([[0b11000000] + [0] * 15], dtype=torch.uint8))
    processed = process_logits(logits, *asking([Asker(params), Asker(params)]), masks)
    assert torch.equal(logits, torch.zeros(2, VOCAB)), "the model's own logits stay"
    assert processed.isfinite().sum(1).tolist() == [3, 2]
    assert processed[1, 6:8].tolist() == [1.0, 0.0]


# ---- through the runner


def runner_of():
    return tiny_runner(tiny_slots(3), tiny_cache(20))


def bound(slot: int, **more):
    return slot_init(slot, [5, 9, 2], blocks=[1 + slot], params=GREEDY, **more)


def test_the_mask_is_asked_for_once_and_decides_the_token():
    asked: list[int] = []

    def ask() -> Masks:
        asked.append(1)
        return masks_of(4, [{11}])

    binds, rows = [bound(0), bound(1)], [(0, 0, 3, True), (1, 0, 3, True)]
    free = runner_of().step(step_plan(4, bind=binds, rows=rows)).tokens.tolist()
    plan = step_plan(4, bind=binds, rows=rows, masked=[1])
    result = runner_of().step(plan, ask)
    assert result.tokens.tolist() == [free[0], 11]
    assert asked == [1]
    assert free[1] != 11, "choose another token: the model says this one anyway"


def test_where_the_mask_and_the_parameters_leave_nothing_the_row_fails_alone():
    params = SamplingParams(temperature=1.0, allowed_token_ids=[3])
    binds = [slot_init(0, [5, 9, 2], blocks=[1], params=params), bound(1)]
    plan = step_plan(1, bind=binds, rows=[(0, 0, 3, True), (1, 0, 3, True)], masked=[0])
    result = runner_of().step(plan, lambda: masks_of(1, [{11}]))
    assert result.failed.tolist() == [0]
    assert result.tokens.tolist()[0] == 0


def test_each_place_of_a_row_with_drafts_has_a_mask_of_its_own():
    """What is sampled behind a draft is what its mask leaves, whatever the other places' say."""
    rows, drafts = [(0, 0, 5, True), (1, 0, 3, True)], {0: [11, 12]}
    binds = [slot_init(n, [5, 9, 2], blocks=[1 + 2 * n, 2 + 2 * n]) for n in range(2)]
    free = runner_of().step(step_plan(4, bind=[binds[1]], rows=rows[1:])).tokens.tolist()
    plan = step_plan(4, bind=binds, zero=[1, 2, 3], rows=rows, drafts=drafts, masked=[0, 1, 2])
    for last in (13, 14):
        masks = masks_of(4, [{11}, {12}, {last}])
        result = runner_of().step(plan, lambda masks=masks: masks)
        assert result.tokens.tolist() == [11, 12, last, *free]
    refused = runner_of().step(plan, lambda: masks_of(4, [{11}, {7}, {13}]))
    assert refused.counts.tolist() == [2, 1]
    assert refused.tokens.tolist() == [11, 7, *free]


@pytest.mark.parametrize("place", [-1, 1])
def test_masks_for_places_that_are_not_there_are_refused(place):
    plan = step_plan(4, bind=[bound(0)], rows=[(0, 0, 3, True)], masked=[place])
    with pytest.raises(ValueError, match="do not exist"):
        runner_of().step(plan, lambda: masks_of(4, [{1}]))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "does not hold its masks"),
        (masks_of(5, [{1}]), "does not hold its masks"),
        (masks_of(4, [{1}, {2}]), "for 1 places"),
        (masks_of(4, [{1}], 33), "for 1 places"),
    ],
)
def test_masks_that_are_not_the_plans_are_refused(answer, says):
    plan = step_plan(4, bind=[bound(0)], rows=[(0, 0, 3, True)], masked=[0])
    with pytest.raises(ValueError, match=says):
        runner_of().step(plan, lambda: answer)
