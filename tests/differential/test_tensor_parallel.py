"""The ranks of a tensor parallel group together compute what one worker computes: every family
against transformers, with gloo between the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tests.support.checkpoints import write_directory
from tests.support.eager import (
    BLOCK_TOKENS,
    CPU,
    EagerStepper,
    assert_same,
    expected,
    load,
    some_tokens,
)
from tests.support.family_models import BIASED, MODEL_TYPES, TIED, UNDIVIDED, WINDOW, random_model
from tests.support.gguf_files import write_gguf
from tests.support.kernels import native_kernels
from tests.support.quantized_files import FORMATS, write_quantized
from tests.support.ranks import in_ranks, load_share
from worker.attention.select import select_attention
from worker.checkpoint.huggingface import SafetensorsWeights
from worker.layers.group import Group
from worker.loading.decoder import load_model

NUM_TOKENS = 40
STEPS = [(25,), (1,), (14,)]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, TIED | BIASED | {"mlp_bias": True, "vocab_size": 319}],
    "mistral": [WINDOW],
    "qwen3_moe": [{}, {"mlp_only_layers": [1], "decoder_sparse_step": 1}],
    "olmo2": [{}, BIASED],
    "phimoe": [{}, BIASED | {"lm_head_bias": True, "vocab_size": 319}],
}
"""Model type -> changes of its config. Other model types are tested without changes."""
CASES = [
    (kind, changes)
    for kind in MODEL_TYPES
    if kind not in UNDIVIDED
    for changes in VARIANTS.get(kind, [{}])
]
"""Model types and changes of their configs."""


def logits_of_ranks(path: Path, size: int, tokens: list[int]) -> list[Tensor]:
    """Return the logits [tokens, V] that each rank has."""

    def run(group: Group) -> Tensor:
        return EagerStepper(load_share(path, group), [tokens]).run(STEPS)[0]

    return in_ranks(size, run)


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=str)
def test_two_ranks_have_the_logits_of_transformers_and_equal_bits(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    theirs = random_model(model_type, **changes)
    tokens = some_tokens(NUM_TOKENS, vocab=theirs.config.vocab_size)
    first, second = logits_of_ranks(write_directory(tmp_path, theirs), 2, tokens)
    assert torch.equal(first, second)
    logits = expected(theirs, tokens)
    assert_same(first, logits, 1e-4 * max(1.0, float(logits.abs().max()) / 10))


def test_three_ranks_share_an_uneven_vocabulary_and_experts(tmp_path: Path) -> None:
    """The last rank has fewer tokens than the others, and the second one more experts."""
    sizes = {"num_key_value_heads": 3, "vocab_size": 320, "intermediate_size": 48}
    theirs = random_model("mixtral", **sizes)
    tokens = some_tokens(NUM_TOKENS)
    ranks = logits_of_ranks(write_directory(tmp_path, theirs), 3, tokens)
    assert all(torch.equal(ranks[0], other) for other in ranks[1:])
    logits = expected(theirs, tokens)
    assert_same(ranks[0], logits, 1e-4 * max(1.0, float(logits.abs().max()) / 10))


def test_sums_have_equal_bits_on_all_ranks_and_for_any_number_of_rows() -> None:
    """The sum of three numbers depends on their order, which must depend on neither the rank nor on
    the other rows. gloo's own sum would depend on the rows."""

    def run(group: Group) -> list[Tensor]:
        part = torch.randn(37, 65, generator=torch.Generator().manual_seed(group.rank))
        rows = torch.cat([group.sum(rows) for rows in part.split(5)])
        rounded = group.sum(part.bfloat16())
        assert rounded.dtype == torch.bfloat16
        return [group.sum(part), rows, rounded]

    ranks = in_ranks(3, run)
    for others in ranks[1:]:
        assert all(map(torch.equal, ranks[0], others))
    whole, by_rows, _ = ranks[0]
    assert torch.equal(whole, by_rows)


def test_the_ranks_compute_in_bfloat16_nearly_what_one_worker_does(tmp_path: Path) -> None:
    theirs = random_model("llama", initializer_range=0.05)
    path, tokens = write_directory(tmp_path, theirs), some_tokens(NUM_TOKENS)

    def run(group: Group) -> Tensor:
        loaded = load_share(path, group, torch.bfloat16)
        attention = select_attention(BLOCK_TOKENS, dtype=torch.bfloat16)
        return EagerStepper(loaded, [tokens], attention, torch.bfloat16).run(STEPS)[0]

    first, second = in_ranks(2, run)
    assert torch.equal(first, second)
    logits = expected(theirs, tokens)
    assert (first - logits).norm() / logits.norm() < 0.03


def test_compiled_kernels_compute_what_is_between_the_layers_of_a_rank(tmp_path: Path) -> None:
    theirs, tokens = random_model("qwen3", hidden_size=192), some_tokens(NUM_TOKENS)
    path, kernels = write_directory(tmp_path, theirs), native_kernels()

    def run(group: Group) -> Tensor:
        loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, group=group)
        assert loaded.model.kernels is kernels
        assert loaded.model.whole is None
        attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=kernels)
        return EagerStepper(loaded, [tokens], attention).run(STEPS)[0]

    first, second = in_ranks(2, run)
    assert torch.equal(first, second)
    logits = expected(theirs, tokens)
    assert_same(first, logits, 1e-4 * max(1.0, float(logits.abs().max()) / 10))


def gguf_file(folder: Path) -> Path:
    """A Llama whose file has the rows of queries and keys in another order."""
    q8_0 = GGMLQuantizationType.Q8_0
    return write_gguf(folder / "m.gguf", random_model("llama"), lambda _: q8_0)


def awq_directory(folder: Path) -> Path:
    return write_quantized(folder, random_model("llama"), FORMATS["awq"])[0]


def fused_gguf(folder: Path) -> Path:
    """A file with one tensor for queries, keys and values, and one for gate and up."""
    return write_gguf(folder / "m.gguf", random_model("phi3"))


@pytest.mark.parametrize("write", [gguf_file, awq_directory, fused_gguf])
def test_the_ranks_of_a_quantised_file_compute_with_its_numbers(tmp_path: Path, write: Any) -> None:
    path, tokens = write(tmp_path), some_tokens(NUM_TOKENS)
    alone = EagerStepper(load(path), [tokens]).run(STEPS)[0]
    first, second = logits_of_ranks(path, 2, tokens)
    assert torch.equal(first, second)
    assert_same(first, alone, 1e-4 * max(1.0, float(alone.abs().max()) / 10))


def test_the_card_describes_the_whole_model(tmp_path: Path) -> None:
    path = write_directory(tmp_path, random_model("mixtral", num_key_value_heads=2))
    whole = load(path).card
    cards = in_ranks(2, lambda group: load_share(path, group).card)
    for card in cards:
        assert (card.digest, card.num_parameters) == (whole.digest, whole.num_parameters)
        assert card.numerics == ""
        assert card.weights_bytes < whole.weights_bytes


def test_each_rank_reads_only_its_part_of_a_safetensors_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_directory(tmp_path, random_model("llama"))
    read = SafetensorsWeights.read_into
    whole: set[str] = set()

    def counted(self: SafetensorsWeights, name: str, target: Tensor, index: Any = None) -> None:
        whole.add(name.removesuffix(".weight").rpartition(".")[2])
        read(self, name, target, index)

    monkeypatch.setattr(SafetensorsWeights, "read_into", counted)
    in_ranks(2, lambda group: load_share(path, group).card)
    assert whole == {"input_layernorm", "post_attention_layernorm", "norm"}
