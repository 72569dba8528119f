"""A real model gives the same answers with drafts as without, in fewer steps.

tests/support/drafted.py defines which answers are the same, and compares a hundred prompts.
"""

from __future__ import annotations

import json

import pytest
import tokenizers
from msgspec.structs import replace

from protocol.grammar import Grammar, JsonSchema
from protocol.sampling import SamplingParams
from tests.support.drafted import is_same, prompts, replica_of
from tests.support.model import smollm2_gguf
from tests.support.replica import load
from worker.models.load import LoadedModel

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(smollm2_gguf())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("speculation", "num_prompts", "num_blocks"),
    [("ngram", 24, 1024), ("model", 12, 1024), ("ngram", 12, 29), ("model", 8, 29)],
    ids=["ngram", "model", "ngram preempted", "model preempted"],
)
def test_greedy_answers_are_the_same_with_drafts(
    loaded: LoadedModel, speculation: str, num_prompts: int, num_blocks: int
) -> None:
    some = prompts()[-num_prompts:]
    slow, fast = (replica_of(loaded, kind, num_blocks) for kind in ("none", speculation))
    for replica in (slow, fast):
        replica.answers(some, GREEDY)
    equal = sum(is_same(slow, fast, number) for number in range(len(some)))
    plain, stats = slow.engine.stats(), fast.engine.stats()
    print(
        f"{equal} of {len(some)} equal; {stats.num_accepted_tokens} of {stats.num_draft_tokens} "
        f"drafts right, {stats.num_steps} steps instead of {plain.num_steps}"
    )
    assert equal >= len(some) - 1
    assert stats.num_accepted_tokens > 0
    assert (stats.num_preemptions > 0) == (num_blocks < 100)
    assert stats.num_steps < plain.num_steps or num_blocks < 100
    if speculation == "model":
        assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens, (
            "drafts of the model itself are wrong"
        )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_p=0.8, seed=3),
        SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2, min_tokens=20),
        SamplingParams(temperature=0.9, top_k=5, frequency_penalty=-0.5, bad_words=[[28], [30]]),
    ],
    ids=["filters", "penalised", "encouraged"],
)
def test_sampled_answers_are_the_same_with_drafts(
    loaded: LoadedModel, params: SamplingParams
) -> None:
    params = replace(params, max_tokens=24, ignore_eos=True)
    answers = []
    for kind in ("none", "ngram", "model"):
        replica = replica_of(loaded, kind)
        answers.append(replica.answers(prompts()[-4:], params))
    for fast in answers[1:]:
        assert sum(a == b for a, b in zip(answers[0], fast, strict=True)) >= 3, (
            "more than one answer differs"
        )


PEOPLE = json.dumps(
    {
        "type": "object",
        "properties": {
            "people": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "first_name": {"type": "string", "maxLength": 12},
                        "favourite_colour": {"enum": ["red", "green", "blue"]},
                    },
                    "required": ["first_name", "favourite_colour"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["people"],
        "additionalProperties": False,
    }
)
QUESTIONS = ["Who are the people in this story?"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_with_a_schema_are_the_same_with_drafts_in_fewer_steps(
    loaded: LoadedModel, temperature: float
) -> None:
    encoder = tokenizers.Tokenizer.from_buffer(loaded.card.tokenizer)
    params = SamplingParams(temperature=temperature, max_tokens=80, logprobs=2)
    replicas = [replica_of(loaded, kind) for kind in ("none", "ngram")]
    for replica in replicas:
        for number, question in enumerate(QUESTIONS):
            chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            grammar = Grammar(body=JsonSchema(text=PEOPLE))
            replica.add(encoder.encode(chat).ids, replace(params, seed=number), grammar)
        replica.run()
    plain, fast = replicas
    for number in range(len(QUESTIONS)):
        assert plain.tokens(number) == fast.tokens(number)
        people = json.loads(encoder.decode(fast.tokens(number)))["people"]
        assert all(person.keys() == {"first_name", "favourite_colour"} for person in people)
    steps = [replica.engine.stats().num_steps for replica in replicas]
    print(f"{steps[0]} steps, {steps[1]} with drafts")
    assert steps[1] < steps[0] * 0.8
