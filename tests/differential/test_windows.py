"""Models with windows against transformers, in a cache smaller than their texts.

For layers with a window, the cache holds only a few windows. For layers without one, it holds one
text. So the answers are right only if the blocks before each window are freed, and no block is
freed too early.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import max_held_blocks, num_column_blocks
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.sampling import SamplingParams
from tests.support.checkpoints import write_directory
from tests.support.eager import expected, some_tokens
from tests.support.family_models import FULL, SLIDING, random_model
from tests.support.kernels import native_kernels
from tests.support.replica import Replica, load
from worker.loading.decoder import LoadedModel
from worker.startup.kv_window import kv_groups

WINDOW, BLOCK_TOKENS, BUDGET = 24, 4, 9
SIZES = {"sliding_window": WINDOW, "hidden_size": 192, "num_hidden_layers": 2}
MAX_LEN = 10 * WINDOW
ATOL = 2e-3


OWN_SIZES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING] * 3 + [FULL],
    },
    # Layers of two shapes; the last two read the keys and values of the third and the fourth.
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    },
}
WINDOWED = ["phi3", "mistral, compiled"]
ALTERNATING = ["gpt_oss", "gemma3_text, compiled", "gemma4_text", "gemma4_text, compiled"]


@pytest.fixture(scope="module", params=WINDOWED + ALTERNATING)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Any, LoadedModel]:
    """Return a model of transformers, and ours with the same weights."""
    kind, _, compiled = request.param.partition(", ")
    theirs = random_model(kind, **SIZES | OWN_SIZES.get(kind, {}))
    path = write_directory(tmp_path_factory.mktemp("model"), theirs)
    if not compiled:
        return theirs, load(path)
    return theirs, load(path, kernels=native_kernels(), weights="packed")


def small(loaded: LoadedModel, num_windows: int, **options: Any) -> Replica:
    """Return a replica whose cache has room for this many windows, each with a chunk, and for one
    whole text in the layers without a window."""
    groups = kv_groups(WorkerConfig(model="", max_len=MAX_LEN), [loaded.spec])
    live = max_held_blocks(MAX_LEN, BUDGET, block_tokens=BLOCK_TOKENS, window=WINDOW)
    columns = -(-MAX_LEN // BLOCK_TOKENS)
    num_blocks = num_windows * live
    if groups is not None:
        num_blocks = columns + num_windows * live * groups.window_blocks
    assert num_blocks < columns * num_column_blocks(groups) / 1.5
    replica = Replica(
        loaded,
        token_budget=BUDGET,
        max_slots=4,
        num_blocks=1 + num_blocks,
        block_tokens=BLOCK_TOKENS,
        max_len=MAX_LEN,
        **options,
    )
    assert replica.engine.limits.max_len == MAX_LEN
    return replica


def check(replica: Replica, theirs: Any, number: int, prompt: list[int], most: int) -> None:
    """Check that the answer has `most` tokens, each of rank 1, and that the logprobs are those of
    transformers. This includes the logprobs of the prompt, if they were requested."""
    outputs = replica.outputs[number]
    tokens = replica.tokens(number)
    assert len(tokens) == most
    logprobs = expected(theirs, prompt + tokens).log_softmax(-1)
    entries: list[TokenLogprobs] = [entry for output in outputs for entry in output.logprobs]
    prompt_entries = [entry for output in outputs for entry in output.prompt_logprobs]
    if prompt_entries:
        assert len(prompt_entries) == len(prompt) - 1
    first = len(prompt) - 1 if not prompt_entries else 0
    known = (prompt + tokens)[first + 1 :]
    right = logprobs[torch.arange(first, len(prompt + tokens) - 1), torch.tensor(known)]
    ours = torch.tensor([entry.logprob for entry in prompt_entries + entries])
    torch.testing.assert_close(ours, right, rtol=0, atol=ATOL)
    assert all(entry.rank == 1 for entry in entries)


def greedy(most: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, logprobs=0, **more)


def test_one_text_of_many_windows_is_computed_in_a_cache_of_one(
    pair: tuple[Any, LoadedModel],
) -> None:
    theirs, loaded = pair
    replica, prompt = small(loaded, 1), some_tokens(5 * WINDOW + 3)
    number = replica.add(prompt, greedy(2 * WINDOW, prompt_logprobs=0))
    replica.run()
    check(replica, theirs, number, prompt, 2 * WINDOW)
    assert replica.engine.stats().num_preemptions == 0
    assert replica.engine.stats().free_blocks == replica.engine.stats().total_blocks


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_batches_preemptions_cached_prefixes_and_drafts_give_the_same_logprobs(
    pair: tuple[Any, LoadedModel], steps_in_flight: int
) -> None:
    theirs, loaded = pair
    replica = small(
        loaded,
        2,
        steps_in_flight=steps_in_flight,
        options={"speculation": "ngram", "ngram_min": 3},
    )
    text = some_tokens(60, seed=1)
    once = replica.add(text, greedy(48))
    replica.run()
    check(replica, theirs, once, text, 48)
    # Windowed layers together see fewer tokens than `text`, so its repetition gets the same answer.
    prompts = [text + replica.tokens(once) + text] + [some_tokens(5, seed=i) for i in range(3)]
    numbers = [replica.add(prompt, greedy(48)) for prompt in prompts]
    replica.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        check(replica, theirs, number, prompt, 48)
    usage = replica.outputs[numbers[0]][-1].usage
    assert usage is not None
    assert usage.cached_tokens > 3 * WINDOW
    if loaded.spec.window is not None:
        assert usage.accepted_tokens > 24
    assert replica.engine.stats().num_preemptions > 0
    alone = replica.add(prompts[0], greedy(6))
    replica.run()
    check(replica, theirs, alone, prompts[0], 6)
    usage = replica.outputs[alone][-1].usage
    assert usage is not None
    assert usage.draft_tokens > 0
    assert replica.engine.stats().free_blocks == replica.engine.stats().total_blocks
