"""Parameters and masks change the logits in the same way as a reference for one row in plain
Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from protocol.worker.steps import Masks
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.sampled_rows import RowRequest, bind_rows
from tests.support.tiny_model import CPU, VOCAB, tiny_cache, tiny_runner, tiny_slots
from worker.batch.batch import read_rows
from worker.sampling.bans import RowMasks, apply_masks, row_masks
from worker.sampling.logits import process_logits

WORDS = 31
PLAIN = SamplingParams(temperature=0.0)


def reference(logits: list[float], request: RowRequest) -> list[float]:
    """Return the processed logits of one row, computed token by token."""
    params, out = request.params, list(logits)
    answer = request.tokens[request.prompt_tokens :]
    for token in range(len(out)):
        out[token] += params.logit_bias.get(token, 0.0)
        if token in request.tokens:
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= params.frequency_penalty * answer.count(token)
        out[token] -= params.presence_penalty * (token in answer)
        if len(answer) < params.min_tokens and token in request.stop_ids:
            out[token] = -math.inf
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -math.inf
        if any(ends_with(word, [*answer, token]) for word in params.bad_words):
            out[token] = -math.inf
    return out


def ends_with(word: list[int], answer: list[int]) -> bool:
    """Return whether the answer ends with the word."""
    return len(word) <= len(answer) and answer[len(answer) - len(word) :] == word


TOKEN = st.integers(0, WORDS - 1)
ADDITIVE = st.sampled_from([0.0, 0.0, 0.5, -2.0, 1.7])


@st.composite
def words(draw, tokens: list[int]) -> list[int]:
    """Draw a bad word. Most bad words are the last tokens of the request and one further token."""
    last = tokens[len(tokens) - draw(st.integers(0, min(5, len(tokens)))) :]
    return [*draw(st.sampled_from([[], last, last])), draw(TOKEN)]


@st.composite
def requests(draw) -> RowRequest:
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=20))
    prompt_tokens = draw(st.integers(1, len(tokens)))
    min_tokens = draw(st.sampled_from([0, 0, 1, 5]))
    params = SamplingParams(
        logit_bias=draw(st.dictionaries(TOKEN, st.sampled_from([-100.0, 2.5, 100.0]), max_size=4)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3])),
        frequency_penalty=draw(ADDITIVE),
        presence_penalty=draw(ADDITIVE),
        min_tokens=min_tokens,
        allowed_token_ids=draw(st.none() | st.lists(TOKEN, min_size=1, max_size=9)),
        bad_words=draw(st.lists(words(tokens), max_size=6)),
    )
    return RowRequest(
        params,
        tokens,
        prompt_tokens=prompt_tokens,
        stop_ids=draw(st.lists(TOKEN, max_size=5, unique=True)),
    )


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WORDS, generator=torch.Generator().manual_seed(seed)) * 4


@given(group=st.lists(requests(), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_batch_of_any_parameters_equals_its_rows_one_by_one(group, seed):
    logits = random_logits(len(group), seed)
    processed = process_logits(logits, *bind_rows(group))
    expected = [
        reference(row, request) for row, request in zip(logits.tolist(), group, strict=True)
    ]
    torch.testing.assert_close(processed, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(group=st.lists(requests(), min_size=2, max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_row_has_the_same_bits_alone_and_among_others(group):
    logits = random_logits(len(group))
    together = process_logits(logits, *bind_rows(group))
    for row, request in enumerate(group):
        assert torch.equal(
            process_logits(logits[row : row + 1], *bind_rows([request]))[0], together[row]
        )


def test_logits_are_not_copied_if_no_row_changes_them():
    logits = random_logits(3)
    finished = RowRequest(
        SamplingParams(min_tokens=2), tokens=[1, 2, 3], prompt_tokens=1, stop_ids=[4]
    )
    group = [RowRequest(PLAIN), RowRequest(SamplingParams(top_k=2, logprobs=3)), finished]
    assert process_logits(logits, *bind_rows(group)) is logits


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={0: 3.0}),
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(frequency_penalty=1.0),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(min_tokens=9),
        SamplingParams(allowed_token_ids=[3, 4]),
        SamplingParams(bad_words=[[5, 0, 0], [8]]),
    ],
)
def test_the_models_own_logits_and_the_other_rows_are_left_as_they_are(params):
    logits = random_logits(3)
    before = logits.clone()
    request = RowRequest(params, tokens=[0, 5, 0], prompt_tokens=1, stop_ids=[0])
    processed = process_logits(logits, *bind_rows([RowRequest(PLAIN), request, RowRequest(PLAIN)]))
    assert torch.equal(logits, before)
    assert torch.equal(processed[[0, 2]], before[[0, 2]])
    assert processed[1, 0] != before[1, 0]


def test_end_tokens_are_possible_from_the_first_position_that_min_tokens_allows():
    requests = [
        RowRequest(SamplingParams(min_tokens=2), [9] * n, 3, stop_ids=[6, 2]) for n in (3, 4, 5)
    ]
    processed = process_logits(random_logits(3), *bind_rows(requests))
    assert processed[:, [2, 6]].isinf().all(1).tolist() == [True, True, False]


def test_a_bad_word_is_impossible_only_at_its_last_token_and_only_within_the_answer():
    """The bad word is [7, 8, 9], and the prompt is [7, 8]. `answers` maps each answer to whether 9
    is banned after it."""
    answers = {(): False, (7,): False, (8,): False, (7, 8): True, (1, 7, 8): True, (8, 7): False}
    params = SamplingParams(bad_words=[[7, 8, 9]])
    group = [RowRequest(params, [7, 8, *answer], prompt_tokens=2) for answer in answers]
    processed = process_logits(random_logits(len(group)), *bind_rows(group))
    assert processed[:, 9].isinf().tolist() == list(answers.values())
    assert int(processed.isinf().sum()) == 2


def test_the_longest_lists_fit_a_slot():
    ids = [token % WORDS for token in range(1024)]
    params = SamplingParams(
        allowed_token_ids=ids,
        bad_words=[[1, 2, 3, 4]] * 256,
        logit_bias={token: 0.5 for token in range(WORDS)},
        logprob_token_ids=ids[:128],
    )
    logits = random_logits(1)
    processed = process_logits(logits, *bind_rows([RowRequest(params)]))
    torch.testing.assert_close(processed, logits + 0.5)


# ---- masks of grammars
def bits_of(tokens: set[int], vocab: int) -> list[int]:
    """Return the mask that allows `tokens`, as signed 32-bit words."""
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


def test_a_mask_changes_only_its_row_and_only_forbidden_tokens():
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


def test_a_mask_applies_after_every_parameter():
    params = SamplingParams(logit_bias={5: 100.0, 6: 1.0}, allowed_token_ids=[5, 6, 7])
    logits = torch.zeros(2, VOCAB)
    masks = RowMasks(torch.tensor([1]), torch.tensor([[0b11000000] + [0] * 15], dtype=torch.uint8))
    processed = process_logits(logits, *bind_rows([RowRequest(params), RowRequest(params)]), masks)
    assert torch.equal(logits, torch.zeros(2, VOCAB)), "the model's own logits stay"
    assert processed.isfinite().sum(1).tolist() == [3, 2]
    assert processed[1, 6:8].tolist() == [1.0, 0.0]


# ---- through the runner
def runner_of():
    return tiny_runner(tiny_slots(3), tiny_cache(20))


def bound(slot: int, **more):
    return slot_init(slot, [5, 9, 2], blocks=[1 + slot], params=GREEDY, **more)


def test_the_mask_is_requested_once_and_decides_the_token():
    calls: list[int] = []

    def receive_masks() -> Masks:
        calls.append(1)
        return masks_of(4, [{11}])

    binds, rows = [bound(0), bound(1)], [(0, 0, 3, True), (1, 0, 3, True)]
    free = runner_of().step(step_plan(4, bind=binds, rows=rows)).tokens.tolist()
    plan = step_plan(4, bind=binds, rows=rows, masked=[1])
    result = runner_of().step(plan, receive_masks)
    assert result.tokens.tolist() == [free[0], 11]
    assert calls == [1]
    assert free[1] != 11, "choose another token: the model samples this one without a mask"


def test_a_row_without_any_allowed_token_fails_alone():
    params = SamplingParams(temperature=1.0, allowed_token_ids=[3])
    binds = [slot_init(0, [5, 9, 2], blocks=[1], params=params), bound(1)]
    plan = step_plan(1, bind=binds, rows=[(0, 0, 3, True), (1, 0, 3, True)], masked=[0])
    result = runner_of().step(plan, lambda: masks_of(1, [{11}]))
    assert result.failed.tolist() == [0]
    assert result.tokens.tolist()[0] == 0


def test_each_place_of_a_row_with_drafts_has_its_own_mask():
    """Only the mask of a place decides its token, whatever the masks of other places allow."""
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
def test_masks_for_missing_places_are_refused(place):
    plan = step_plan(4, bind=[bound(0)], rows=[(0, 0, 3, True)], masked=[place])
    with pytest.raises(ValueError, match="do not exist"):
        runner_of().step(plan, lambda: masks_of(4, [{1}]))


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (None, "the next message must hold its masks"),
        (masks_of(5, [{1}]), "the next message must hold its masks"),
        (masks_of(4, [{1}, {2}]), "for 1 places"),
        (masks_of(4, [{1}], 33), "for 1 places"),
    ],
)
def test_masks_of_another_plan_are_refused(received, message):
    plan = step_plan(4, bind=[bound(0)], rows=[(0, 0, 3, True)], masked=[0])
    with pytest.raises(ValueError, match=message):
        runner_of().step(plan, lambda: received)
