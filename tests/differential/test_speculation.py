"""With a real model: what is said with drafts is what is said without, and is said in fewer steps.

In float32 logits differ in their last bits with the number of positions computed at once; so where
two answers part, they must part at a place where the model itself was undecided.
"""

from __future__ import annotations

import json

import pytest
import tokenizers
from msgspec.structs import replace

from engine_core.engine import Engine
from protocol.config import EngineConfig, WorkerConfig
from protocol.grammar import Grammar, JsonSchema
from protocol.sampling import SamplingParams
from tests.support.model import smollm2_gguf
from tests.support.reference import GOLDEN
from tests.support.replica import Replica, load
from worker.models.load import LoadedModel

TIE = 1e-3
NEAR = 1e-3
"""Logprobs of the same token, with and without drafts."""
MANY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(smollm2_gguf())


def prompts() -> list[list[int]]:
    """Short ones and their second halves: answers differ, and texts repeat themselves."""
    rows = [row["prompt"] + row["tokens"] for row in json.loads(GOLDEN.read_text())]
    return [tokens[:40] for tokens in rows] + [tokens[-24:] for tokens in rows]


def replica_of(loaded: LoadedModel, speculation: str, num_blocks: int = 1024) -> Replica:
    replica = Replica(loaded, num_blocks=num_blocks)
    config = EngineConfig(worker=WorkerConfig(model=""), speculation=speculation, ngram_min=2)
    replica.engine = Engine(config, loaded.card, replica.engine.limits, draw_seed=lambda: 11)
    return replica


def check(one: Replica, two: Replica, number: int) -> bool:
    """Whether two answers are equal; raises AssertionError where they part without a reason."""
    first, second = (
        [entry for output in replica.outputs[number] for entry in output.logprobs]
        for replica in (one, two)
    )
    assert len(first) == len(second) == len(one.tokens(number)) == len(two.tokens(number))
    for a, b in zip(first, second, strict=True):
        if a.token_id != b.token_id:
            assert a.top_logprobs[0] - a.top_logprobs[1] < TIE
            return False
        assert a.logprob == pytest.approx(b.logprob, abs=NEAR)
    return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_blocks", [1024, 29], ids=["", "preempted"])
def test_greedy_answers_are_the_same_with_drafts(loaded: LoadedModel, num_blocks: int) -> None:
    replicas = [replica_of(loaded, kind, num_blocks) for kind in ("none", "ngram")]
    asked = prompts() if num_blocks > 100 else prompts()[:12]
    for replica in replicas:
        replica.answers(asked, MANY)
    equal = sum(check(*replicas, number) for number in range(len(asked)))
    stats = replicas[1].engine.stats()
    print(f"{equal} of {len(asked)} equal; {stats.num_accepted_tokens} drafts were right")
    assert equal >= len(asked) - 1
    assert stats.num_accepted_tokens > 0
    assert (stats.num_preemptions > 0) == (num_blocks < 100)
    assert stats.num_steps <= replicas[0].engine.stats().num_steps or num_blocks < 100


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
    params = replace(params, max_tokens=32, ignore_eos=True)
    said = []
    for kind in ("none", "ngram"):
        replica = replica_of(loaded, kind)
        said.append(replica.answers(prompts()[-8:], params))
    assert sum(a == b for a, b in zip(*said, strict=True)) >= 7, "but for a draw on the edge"


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
QUESTIONS = ["Who are the people in this story?", "List some people."]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_a_schema_are_the_same_with_drafts_and_take_fewer_steps(
    loaded: LoadedModel, temperature: float
) -> None:
    encoder = tokenizers.Tokenizer.from_buffer(loaded.card.tokenizer)
    params = SamplingParams(temperature=temperature, max_tokens=120, logprobs=2)
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
