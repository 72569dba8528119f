"""Logits and greedy answers of the default model in float32 equal those of transformers.

The answers are equal token for token in every test, for example in chunks or with preemption. One
test computes the whole answers to all prompts, sixteen at a time. The other tests of answers
compute half of each answer to fewer prompts, among them a long one. They use the compiled kernels,
as a server does, except for one test with torch.

tests/support/reference.py wrote the reference answers to tests/data. One test compares some of them
with transformers. An answer may differ from the reference only from a tie on, which is a token
whose two best logits in the reference differ by at most TIE. Ties are counted and printed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from protocol.engine.sampling import SamplingParams
from tests.benchmarks.perplexity import EXACT, PROSE, perplexity, tokens_of
from tests.support.eager import EagerStepper, assert_same, expected
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.prompts import NUM_TOKENS, PROMPTS
from tests.support.reference import GOLDEN, greedy, load_reference
from tests.support.replica import Replica, load
from worker.loading.decoder import LoadedModel

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TIE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
HALF = replace(GREEDY, max_tokens=NUM_TOKENS // 2)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Return the model with packed weights, which are the integers of the file, not rounded."""
    return load(smollm2_gguf(), kernels=native_kernels(), weights="packed")


@pytest.fixture(scope="module")
def eager() -> LoadedModel:
    """Return the model that torch computes."""
    return load(smollm2_gguf())


@pytest.fixture(scope="module")
def transformers() -> tuple[Any, Any]:
    """Return the model and the tokenizer of transformers, which take long to load."""
    return load_reference(smollm2_gguf())


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    assert len(rows) == len(PROMPTS) == 32
    assert {len(row["tokens"]) for row in rows} == {NUM_TOKENS}
    return rows


def check(
    answers: list[list[int]], reference: list[dict[str, Any]], params: SamplingParams = HALF
) -> None:
    """Raise AssertionError if an answer differs from the reference before a tie."""
    ties = 0
    for row, answer in zip(reference, answers, strict=True):
        wanted = row["tokens"][: params.max_tokens]
        assert len(answer) == len(wanted)
        if answer == wanted:
            continue
        at = next(i for i, token in enumerate(wanted) if answer[i] != token)
        assert row["gaps"][at] <= TIE, (
            f"prompt {row['prompt'][:8]}...: token {at} is {answer[at]}, transformers has "
            f"{wanted[at]} with a margin of {row['gaps'][at]}"
        )
        ties += 1
    print(f"{len(answers)} answers are equal, {ties} of them up to a tie")


def prompts_of(reference: list[dict[str, Any]]) -> list[list[int]]:
    return [row["prompt"] for row in reference]


def test_smollm2_as_gguf_gives_the_logits_of_transformers(
    eager: LoadedModel, transformers: tuple[Any, Any]
) -> None:
    theirs, tokenizer = transformers
    prompt = "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(prompt, add_special_tokens=False).input_ids
    ours = EagerStepper(eager, [tokens]).run([(len(tokens),)])[0]
    assert_same(ours, expected(theirs, tokens), atol=1e-3)


def test_the_reference_is_what_transformers_generates(
    transformers: tuple[Any, Any], reference: list[dict[str, Any]]
) -> None:
    model, tokenizer = transformers
    for place in (0, 27):
        prompt = tokenizer(PROMPTS[place], add_special_tokens=False).input_ids
        assert prompt == reference[place]["prompt"]
        assert greedy(model, prompt, 8)[0] == reference[place]["tokens"][:8]


def test_greedy_answers_one_at_a_time_equal_transformers(
    loaded: LoadedModel, reference: list[dict[str, Any]]
) -> None:
    """Only every eighth prompt is used, because each answer takes one step per token."""
    some = reference[7::8]
    replica = Replica(loaded, max_slots=1)
    check([replica.answers([prompt], HALF)[0] for prompt in prompts_of(some)], some)


def test_sixteen_greedy_answers_at_a_time_equal_transformers_again_from_the_prefix_cache(
    loaded: LoadedModel, reference: list[dict[str, Any]]
) -> None:
    """The second time, only prompts with a full block are used. The cache has all these blocks."""
    replica = Replica(loaded, max_slots=16)
    check(replica.answers(prompts_of(reference), GREEDY), reference, GREEDY)
    assert max(len(plan.row_slots) for plan in (step.plan for step in replica.steps)) == 16
    before = replica.engine.stats().num_cached_tokens
    long = [row for row in reference if len(row["prompt"]) > 16]
    check(replica.answers(prompts_of(long), HALF), long)
    found = sum((len(prompt) - 1) // 16 * 16 for prompt in prompts_of(long))
    assert replica.engine.stats().num_cached_tokens - before >= found > 0


def test_greedy_answers_in_chunks_of_32_equal_transformers(
    loaded: LoadedModel, reference: list[dict[str, Any]]
) -> None:
    """Only every second prompt is used. The longest one has at least five chunks."""
    some = reference[1::2]
    replica = Replica(loaded, max_slots=16, token_budget=32)
    check(replica.answers(prompts_of(some), HALF), some)
    steps = [plan.row_tokens.tolist() for plan in (step.plan for step in replica.steps)]
    assert max(map(sum, steps)) <= 32
    assert any(1 in step and max(step) > 1 for step in steps), (
        "no step had both a prompt and a decode"
    )


def test_greedy_answers_without_the_prefix_cache_equal_transformers(
    loaded: LoadedModel, reference: list[dict[str, Any]]
) -> None:
    """Only every second prompt is used."""
    some = reference[1::2]
    replica = Replica(loaded, prefix_cache=False)
    check(replica.answers(prompts_of(some), HALF), some)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_greedy_answers_of_preempted_requests_equal_transformers(
    loaded: LoadedModel, reference: list[dict[str, Any]], prefix_cache: bool
) -> None:
    """Only every fourth prompt is used. The requests need twice as many blocks as there are."""
    some = reference[2::4]
    replica = Replica(loaded, num_blocks=17, prefix_cache=prefix_cache)
    check(replica.answers(prompts_of(some), HALF), some)
    assert replica.engine.stats().num_preemptions > 0


def test_greedy_answers_that_torch_computes_equal_transformers(
    eager: LoadedModel, reference: list[dict[str, Any]]
) -> None:
    """Only every fourth prompt is used, among them the longest one."""
    some = reference[3::4]
    replica = Replica(eager, max_slots=16, token_budget=64)
    check(replica.answers(prompts_of(some), HALF), some)


# ---- Perplexity of packed weights.

NUM_TEXT_TOKENS = 320
WITHIN = 0.01


def test_packed_weights_in_bfloat16_have_the_perplexity_of_float32() -> None:
    model, native = smollm2_gguf(), native_kernels()
    exact = EXACT.load(model)
    tokens = tokens_of(exact, PROSE.read_text(encoding="utf-8"))[:NUM_TEXT_TOKENS]
    wanted = perplexity(exact, tokens)
    packed = load(model, torch.bfloat16, kernels=native, weights="packed")
    assert perplexity(packed, tokens) == pytest.approx(wanted, rel=WITHIN)
    assert perplexity(packed, sorted(tokens)) > 2 * wanted, (
        "the perplexity of sorted tokens is too low"
    )
