"""A position has the same bits, however it is computed: the default model on compiled kernels.

Each prompt is first computed alone, in one chunk, and answered with logprobs of its prompt and its
answer. In every other mode, tokens and logprobs equal these to the last bit.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from protocol.messages import TokenLogprobs
from protocol.sampling import SamplingParams
from tests.support.examples import examples
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.reference import GOLDEN
from tests.support.replica import Replica, load
from worker.models.load import LoadedModel

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NUM_PROMPTS, NUM_TOKENS, BLOCK_TOKENS = examples(4, 32), 8, 16
DTYPES = examples([torch.bfloat16], [torch.bfloat16, torch.float32])
SAMPLED = SamplingParams(
    temperature=0.8, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=0
)
CACHED = replace(SAMPLED, prompt_logprobs=None)
"""A request with prompt logprobs computes its whole prompt, so it uses no cached prefix."""

Answer = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load(smollm2_gguf(), request.param, kernels=native_kernels(), weights="packed")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Return prompts of different lengths, the longest first."""
    rows = json.loads(GOLDEN.read_text())
    every = sorted((row["prompt"] for row in rows), key=len, reverse=True)
    longest = [token for prompt in every for token in prompt][:300]
    return [longest, *every[:: len(every) // (NUM_PROMPTS - 1)]][:NUM_PROMPTS]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, prompts: list[list[int]]) -> list[Answer]:
    replica = Replica(loaded, max_slots=1, prefix_cache=False)
    return [answers(replica, [prompt])[0] for prompt in prompts]


def answers(
    replica: Replica, prompts: list[list[int]], params: SamplingParams = SAMPLED
) -> list[Answer]:
    """Return (tokens, logprobs of these, logprobs of the prompt) for each prompt, computed
    together as far as there are slots."""
    numbers = [replica.add(prompt, params) for prompt in prompts]
    replica.run()
    found = []
    for number in numbers:
        outputs = replica.outputs[number]
        entries = [entry for output in outputs for entry in output.logprobs]
        of_prompt = [entry for output in outputs for entry in output.prompt_logprobs]
        found.append((replica.tokens(number), entries, of_prompt))
    return found


def without_prompts(answers: list[Answer]) -> list[Answer]:
    return [(tokens, entries, []) for tokens, entries, _ in answers]


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_of_any_length_change_no_bit(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Answer], budget: int
) -> None:
    """With a budget of 1, the prompt is computed token by token, like an answer."""
    replica = Replica(loaded, max_slots=1, token_budget=budget, prefix_cache=False)
    some = prompts[2:] if budget == 1 else prompts
    assert [answers(replica, [prompt])[0] for prompt in some] == alone[-len(some) :]
    assert replica.engine.stats().num_steps > sum(map(len, some)) / budget


def test_other_rows_of_the_batch_change_no_bit(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Answer]
) -> None:
    replica = Replica(loaded, token_budget=100, prefix_cache=False)
    assert answers(replica, prompts) == alone


def test_the_number_of_threads_changes_no_bit(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Answer]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        assert answers(Replica(loaded, prefix_cache=False), prompts[:2]) == alone[:2]
    finally:
        torch.set_num_threads(before)


def test_a_prefix_from_the_cache_changes_no_bit(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Answer]
) -> None:
    """The cached prefix ends at each block boundary of the longest prompt in turn."""
    longest, wanted = prompts[0], without_prompts(alone[:1])
    for boundary in range(BLOCK_TOKENS, len(longest), examples(6, 1) * BLOCK_TOKENS):
        replica = Replica(loaded, block_tokens=BLOCK_TOKENS)
        replica.answers([longest[: boundary + 1]], replace(CACHED, max_tokens=1))
        assert answers(replica, [longest], CACHED) == wanted
        usage = replica.outputs[1][-1].usage
        assert usage is not None
        assert usage.cached_tokens == boundary


def test_a_preemption_changes_no_bit(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Answer]
) -> None:
    blocks = -(-(len(prompts[0]) + NUM_TOKENS) // 4)
    replica = Replica(loaded, num_blocks=blocks + 8, block_tokens=4)
    assert answers(replica, prompts, CACHED) == without_prompts(alone)
    assert replica.engine.stats().num_preemptions > 0


def test_verified_drafts_change_no_bit(
    loaded: LoadedModel, prompts: list[list[int]], alone: list[Answer]
) -> None:
    options: dict[str, Any] = {"speculation": "ngram", "ngram_min": 1}
    replica = Replica(loaded, options=options, prefix_cache=False)
    assert answers(replica, prompts) == alone
    assert replica.engine.stats().num_draft_tokens > 0
