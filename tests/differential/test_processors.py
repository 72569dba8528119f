"""Instruction sets give the same bits: a model with packed weights and rounded inputs answers the
same on each, to the last bit of its logprobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.replica import Replica
from tests.support.same_bits import BitAnswer, answer, load_small, prompts, write_small
from worker.device.cpuinfo import cpu_flags
from worker.kernels.library import runnable
from worker.loading.decoder import LoadedModel

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LENGTHS = slice(3)
"""Prompts of 300, 70 and 24 tokens. The first is longer than a piece of attention."""
SHORT = slice(2, 3)
"""Prompts of models of which every layer takes long with `generic`."""
QUANTISED = ("Q4_1-int8-kv16", "Q4_K-int8-kv8")
"""Other blocks: the golden numbers of tests/unit/test_kernel_bits.py."""
MIXERS = ("hybrid", "mamba", "conv", "linears between", "lru", "kimi", "selected")
"""Of OF_LAYERS: delta rules, Mamba 1 and 2, short convolutions, RG-LRU, latents and an indexer."""


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_instruction_set_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    """So replicas on unlike processors have one fingerprint, and can continue each other's
    streams."""
    models = _loaded(tmp_path, kind)
    assert len({model.card.numerics for model in models}) == 1
    assert models[0].card.numerics
    _assert_same(models, LENGTHS)


@pytest.mark.parametrize("kind", MIXERS)
def test_every_instruction_set_gives_the_same_bits_in_layers_of_every_kind(
    kind: str, tmp_path: Path
) -> None:
    """Torch computes a part of these models, on this processor. Their matrices are not quantised,
    so their fingerprints promise nothing across instruction sets."""
    _assert_same(_loaded(tmp_path, f"{kind}-int8"), SHORT)


def _assert_same(models: list[LoadedModel], which: slice) -> None:
    first, *others = (_answers(model, which) for model in models)
    assert [other == first for other in others] == [True] * len(others)


def _answers(loaded: LoadedModel, which: slice) -> list[BitAnswer]:
    """Return the answers to some prompts, each computed alone."""
    replica = Replica(loaded, max_slots=1, prefix_cache=False)
    chosen = prompts(LENGTHS.stop, loaded.spec.vocab_size)[which]
    return [answer(replica, prompt) for prompt in chosen]


def _loaded(folder: Path, kind: str) -> list[LoadedModel]:
    """Write one random model, and load it for each instruction set."""
    path = write_small(folder, kind, torch.float32)
    sets = [each.name for each in runnable(cpu_flags())]
    return [load_small(path, kind, torch.float32, name) for name in sets]
