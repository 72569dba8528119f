"""What parameters do to logits, against the same said for one row, token by token, in Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.sampling import SamplingParams
from tests.support.sampled_rows import Asker, asking
from worker.sampling.logits import process_logits

VOCAB = 31
PLAIN = SamplingParams(temperature=0.0)


def twin(logits: list[float], asker: Asker) -> list[float]:
    """One row, token by token, in the order that logits.py promises."""
    params, out = asker.params, list(logits)
    said = asker.tokens[asker.prompt_tokens :]
    for token in range(len(out)):
        out[token] += params.logit_bias.get(token, 0.0)
        if token in asker.tokens:
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= params.frequency_penalty * said.count(token)
        out[token] -= params.presence_penalty * (token in said)
        if len(said) < params.min_tokens and token in asker.stop_ids:
            out[token] = -math.inf
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -math.inf
        if any(is_said(word, [*said, token]) for word in params.bad_words):
            out[token] = -math.inf
    return out


def is_said(word: list[int], answer: list[int]) -> bool:
    """Does the answer end with the word?"""
    return len(word) <= len(answer) and answer[len(answer) - len(word) :] == word


TOKEN = st.integers(0, VOCAB - 1)
ADDITIVE = st.sampled_from([0.0, 0.0, 0.5, -2.0, 1.7])


@st.composite
def words(draw, tokens: list[int]) -> list[int]:
    """Bad words, of which many are nearly said: they begin as the tokens end."""
    said = tokens[len(tokens) - draw(st.integers(0, min(5, len(tokens)))) :]
    return [*draw(st.sampled_from([[], said, said])), draw(TOKEN)]


@st.composite
def askers(draw) -> Asker:
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
    return Asker(
        params,
        tokens,
        prompt_tokens=prompt_tokens,
        stop_ids=draw(st.lists(TOKEN, max_size=5, unique=True)),
    )


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@given(group=st.lists(askers(), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_batch_of_any_parameters_equals_its_rows_one_by_one(group, seed):
    logits = random_logits(len(group), seed)
    processed = process_logits(logits, *asking(group))
    expected = [twin(row, asker) for row, asker in zip(logits.tolist(), group, strict=True)]
    torch.testing.assert_close(processed, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(group=st.lists(askers(), min_size=2, max_size=6))
@settings(max_examples=20, deadline=None)
def test_a_row_has_the_same_bits_alone_and_among_others(group):
    logits = random_logits(len(group))
    together = process_logits(logits, *asking(group))
    for row, asker in enumerate(group):
        assert torch.equal(
            process_logits(logits[row : row + 1], *asking([asker]))[0], together[row]
        )


def test_where_no_row_asks_for_anything_the_logits_are_not_even_copied():
    logits = random_logits(3)
    finished = Asker(SamplingParams(min_tokens=2), tokens=[1, 2, 3], prompt_tokens=1, stop_ids=[4])
    group = [Asker(PLAIN), Asker(SamplingParams(top_k=2, logprobs=3)), finished]
    assert process_logits(logits, *asking(group)) is logits


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
    asker = Asker(params, tokens=[0, 5, 0], prompt_tokens=1, stop_ids=[0])
    processed = process_logits(logits, *asking([Asker(PLAIN), asker, Asker(PLAIN)]))
    assert torch.equal(logits, before)
    assert torch.equal(processed[[0, 2]], before[[0, 2]])
    assert processed[1, 0] != before[1, 0]


def test_end_tokens_are_possible_from_the_first_position_that_min_tokens_allows():
    said = [Asker(SamplingParams(min_tokens=2), [9] * n, 3, stop_ids=[6, 2]) for n in (3, 4, 5)]
    processed = process_logits(random_logits(3), *asking(said))
    assert processed[:, [2, 6]].isinf().all(1).tolist() == [True, True, False]


def test_a_bad_word_is_impossible_only_at_its_last_token_and_only_within_the_answer():
    """The word is [7, 8, 9]; after each of these answers, to the prompt [7, 8], what of 9?"""
    answers = {(): False, (7,): False, (8,): False, (7, 8): True, (1, 7, 8): True, (8, 7): False}
    params = SamplingParams(bad_words=[[7, 8, 9]])
    group = [Asker(params, [7, 8, *answer], prompt_tokens=2) for answer in answers]
    processed = process_logits(random_logits(len(group)), *asking(group))
    assert processed[:, 9].isinf().tolist() == list(answers.values())
    assert int(processed.isinf().sum()) == 2


def test_the_longest_lists_fit_a_slot():
    ids = [token % VOCAB for token in range(1024)]
    params = SamplingParams(
        allowed_token_ids=ids,
        bad_words=[[1, 2, 3, 4]] * 256,
        logit_bias={token: 0.5 for token in range(VOCAB)},
        logprob_token_ids=ids[:128],
    )
    logits = random_logits(1)
    processed = process_logits(logits, *asking([Asker(params)]))
    torch.testing.assert_close(processed, logits + 0.5)
