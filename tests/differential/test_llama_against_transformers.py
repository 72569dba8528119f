"""The native Llama against `transformers`: same files, same logits, however the work is cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.support.checkpoints import (
    LLAMA3_ROPE,
    VOCAB,
    random_llama,
    write_directory,
    write_gguf,
)
from tests.support.model import smollm2_gguf
from tests.support.paged import Row, attention_batch, scattered
from worker.attention.base import Attention
from worker.attention.reference import ReferenceAttention
from worker.attention.select import select_attention
from worker.kv_cache import KVCache
from worker.models.load import LoadedModel, load_model

BLOCK_TOKENS = 4
CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one key/value head": {"num_key_value_heads": 1},
    "as many key/value heads": {"num_key_value_heads": 6},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def load(path: Path) -> LoadedModel:
    return load_model(path, dtype=torch.float32, device=CPU)


@dataclass
class Stepper:
    """A model, its cache, and as many requests as `tokens`: each one's blocks lie scattered."""

    loaded: LoadedModel
    tokens: list[list[int]]
    attention: Attention = field(
        default_factory=lambda: select_attention(BLOCK_TOKENS, dtype=torch.float32)
    )

    def __post_init__(self) -> None:
        config = self.loaded.config
        sizes = [-(-len(tokens) // BLOCK_TOKENS) for tokens in self.tokens]
        shape = (config.num_layers, sum(sizes) + 3, BLOCK_TOKENS)
        shape += (config.num_kv_heads, config.head_dim)  # type: ignore[assignment]
        self.cache = KVCache(*shape, torch.float32, CPU)
        self.blocks = scattered(sum(sizes) + 3, *sizes)
        self.computed = [0] * len(sizes)

    def step(self, *counts: int) -> list[Tensor]:
        """Compute so many further tokens of each request -> their logits. Decode rows first."""
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: counts[i] > 1)
        rows = [Row(self.computed[i], counts[i], self.blocks[i]) for i in order]
        ids = [t for i in order for t in self.tokens[i][self.computed[i] :][: counts[i]]]
        batch = attention_batch(rows, BLOCK_TOKENS)
        hidden = self.loaded.model(torch.tensor(ids), batch, self.cache, self.attention)
        logits = self.loaded.model.logits(hidden).split([row.count for row in rows])
        self.computed = [done + n for done, n in zip(self.computed, counts, strict=True)]
        result = [torch.empty(0, VOCAB)] * len(counts)
        for i, part in zip(order, logits, strict=True):
            result[i] = part
        return result

    def run(self, steps: list[tuple[int, ...]]) -> list[Tensor]:
        """All steps -> each request's logits [tokens, V]."""
        parts = [self.step(*counts) for counts in steps]
        return [torch.cat([part[i] for part in parts]) for i in range(len(self.tokens))]


def some_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()


@torch.inference_mode()
def expected(model: Any, tokens: list[int]) -> Tensor:
    """[tokens, V], by transformers, in one go."""
    return model(torch.tensor([tokens])).logits[0]


def assert_same(ours: Tensor, theirs: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [[(61,)], [(7,), (1,), (30,), (23,)], [(40,), *[(1,)] * 21]])
def test_logits_are_those_of_transformers_whole_in_chunks_and_token_by_token(
    tmp_path: Path, variant: str, steps: list[tuple[int, ...]]
) -> None:
    theirs, tokens = random_llama(**VARIANTS[variant]), some_tokens(61)
    stepper = Stepper(load(write_directory(tmp_path, theirs)), [tokens])
    assert_same(stepper.run(steps)[0], expected(theirs, tokens))


def test_requests_in_one_batch_do_not_see_each_other(tmp_path: Path) -> None:
    theirs = random_llama(rope_parameters=LLAMA3_ROPE)
    requests = [some_tokens(count, seed=count) for count in (50, 9, 33)]
    stepper = Stepper(load(write_directory(tmp_path, theirs)), requests)
    steps = [(20, 8, 0), (1, 1, 30), (28, 0, 1), (1, 0, 1), (0, 0, 1)]
    for ours, tokens in zip(stepper.run(steps), requests, strict=True):
        assert_same(ours, expected(theirs, tokens))


def test_the_slow_twin_of_attention_says_the_same(tmp_path: Path) -> None:
    theirs, tokens = random_llama(), some_tokens(40)
    loaded = load(write_directory(tmp_path, theirs))
    stepper = Stepper(loaded, [tokens], ReferenceAttention())
    assert_same(stepper.run([(25,), (1,), (14,)])[0], expected(theirs, tokens))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_file_holds_the_same_model(tmp_path: Path, variant: str) -> None:
    theirs, tokens = random_llama(**VARIANTS[variant]), some_tokens(40)
    stepper = Stepper(load(write_gguf(tmp_path / "tiny.gguf", theirs)), [tokens])
    assert_same(stepper.run([(40,)])[0], expected(theirs, tokens))


def test_shards_and_half_precision_are_read_as_they_are(tmp_path: Path) -> None:
    tokens = some_tokens(20)
    for dtype in (torch.bfloat16, torch.float16):
        model = random_llama().to(dtype)
        path = write_directory(tmp_path / str(dtype), model, max_shard_size="200KB")
        assert len(list(path.glob("*.safetensors"))) > 1
        theirs = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ours = Stepper(load(path), [tokens]).run([(20,)])[0]
        assert_same(ours, expected(theirs, tokens))


def test_smollm2_as_gguf_is_the_model_that_transformers_reads() -> None:
    from tests.support.reference import load_reference

    path = smollm2_gguf()
    theirs, tokenizer = load_reference(path)
    prompt = "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(prompt, add_special_tokens=False).input_ids
    ours = Stepper(load(path), [tokens]).run([(len(tokens),)])[0]
    assert_same(ours, expected(theirs, tokens), atol=1e-3)
