"""A real model gives the same answers with drafts as without, in fewer steps.

tests/support/drafted.py defines which answers are the same, and compares a hundred prompts.
"""

from __future__ import annotations

import json

import pytest
import tokenizers
from msgspec.structs import replace

from protocol.engine.grammar import Grammar, JsonSchema
from protocol.engine.sampling import SamplingParams
from tests.support.drafted import is_same, prompts, replica_of
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.replica import Replica, load
from worker.loading.decoder import LoadedModel

pytestmark = pytest.mark.timeout(600)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
GREEDY_PROMPTS, GREEDY_SLOTS = prompts()[-12:], 8
"""There are fewer slots than prompts: an answer that ends in fewer steps frees its slot early."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(smollm2_gguf(), kernels=native_kernels(), weights="packed")


@pytest.fixture(scope="module")
def slow(loaded: LoadedModel) -> Replica:
    """Return a replica that has answered all prompts without drafts."""
    replica = replica_of(loaded, "none", max_slots=GREEDY_SLOTS)
    replica.answers(GREEDY_PROMPTS, GREEDY)
    return replica


@pytest.mark.parametrize(
    ("num_prompts", "num_blocks"), [(12, 1024), (8, 29)], ids=["all at once", "preempted"]
)
@pytest.mark.parametrize("speculation", ["ngram", "model"])
def test_greedy_answers_are_the_same_with_drafts(
    loaded: LoadedModel,
    slow: Replica,
    speculation: str,
    num_prompts: int,
    num_blocks: int,
) -> None:
    fast = replica_of(loaded, speculation, num_blocks, max_slots=GREEDY_SLOTS)
    fast.answers(GREEDY_PROMPTS[:num_prompts], GREEDY)
    equal = sum(is_same(slow, fast, number) for number in range(num_prompts))
    plain, stats = slow.engine.stats(), fast.engine.stats()
    print(
        f"{equal} of {num_prompts} equal; {stats.num_accepted_tokens} of {stats.num_draft_tokens} "
        f"drafts right, {stats.num_steps} steps instead of {plain.num_steps}"
    )
    assert equal >= num_prompts - 1
    assert stats.num_accepted_tokens > 0
    assert (stats.num_preemptions > 0) == (num_blocks < 100)
    assert stats.num_steps < plain.num_steps or num_blocks < 100
    if speculation == "model":
        assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens, (
            "drafts of the model itself are wrong"
        )


SAMPLED = {
    "filters": SamplingParams(temperature=0.7, top_p=0.8, seed=3),
    "penalised": SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2, min_tokens=20),
    "encouraged": SamplingParams(
        temperature=0.9, top_k=5, frequency_penalty=-0.5, bad_words=[[28], [30]]
    ),
}


@pytest.fixture(scope="module")
def sampled(loaded: LoadedModel) -> dict[str, dict[str, list[list[int]]]]:
    """Return answers by kind of drafts and by name of parameters. All requests with one kind of
    drafts are in one batch."""
    answers: dict[str, dict[str, list[list[int]]]] = {}
    for kind in ("none", "ngram", "model"):
        replica = replica_of(loaded, kind)
        numbers = {
            name: [
                replica.add(prompt, replace(params, max_tokens=24, ignore_eos=True))
                for prompt in prompts()[-4:]
            ]
            for name, params in SAMPLED.items()
        }
        replica.run()
        answers[kind] = {name: [*map(replica.tokens, rows)] for name, rows in numbers.items()}
    return answers


@pytest.mark.parametrize("kind", ["ngram", "model"])
@pytest.mark.parametrize("params", SAMPLED)
def test_sampled_answers_are_the_same_with_drafts(
    sampled: dict[str, dict[str, list[list[int]]]], params: str, kind: str
) -> None:
    slow, fast = sampled["none"][params], sampled[kind][params]
    assert sum(a == b for a, b in zip(slow, fast, strict=True)) >= 3, "more than one answer differs"


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
QUESTION = "Who are the people in this story?"
TEMPERATURES = (0.0, 1.0)


def test_answers_with_a_schema_are_the_same_with_drafts_in_fewer_steps(loaded: LoadedModel) -> None:
    encoder = tokenizers.Tokenizer.from_buffer(loaded.card.tokenizer)
    chat = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    grammar = Grammar(body=JsonSchema(text=PEOPLE))
    replicas = [replica_of(loaded, kind) for kind in ("none", "ngram")]
    for replica in replicas:
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=80, logprobs=2)
            replica.add(encoder.encode(chat).ids, params, grammar)
        replica.run()
    plain, fast = replicas
    for number in range(len(TEMPERATURES)):
        assert plain.tokens(number) == fast.tokens(number)
        people = json.loads(encoder.decode(fast.tokens(number)))["people"]
        assert all(person.keys() == {"first_name", "favourite_colour"} for person in people)
    steps = [replica.engine.stats().num_steps for replica in replicas]
    print(f"{steps[0]} steps, {steps[1]} with drafts")
    assert steps[1] < steps[0] * 0.8
