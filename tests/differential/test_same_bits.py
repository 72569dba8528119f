"""A position has the same bits, however it is computed: real and tiny models on compiled kernels.

`python -m tests.torture.same_bits` compares more prompts, boundaries and types of weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.adapters import random_adapter
from tests.support.checkpoints import write_directory
from tests.support.family_models import random_model
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.replica import load
from tests.support.same_bits import DENSE, OF_LAYERS, WAYS, Subject, small_model, together, ways_for
from worker.kernels.packed import PackedLinear
from worker.layers.linear import Dense, linears_in

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NUM_PROMPTS, EVERY = 4, 9
SHORTEST = {
    "chunks of 1": 2,
    "chunks of 7": 3,
    "other threads": 3,
    "preempted": 3,
    "preempted at each step": 1,
    "model drafts": 3,
    "fetched by zmq": 2,
    "host tier": 3,
    "disk tier": 2,
}
"""Slow ways -> number of prompts, the shortest ones, that are computed in this way."""
SMALL_WAYS = ("chunks of 7", "in a batch", "model drafts")


@pytest.fixture(scope="module")
def default() -> Subject:
    loaded = load(smollm2_gguf(), torch.bfloat16, kernels=native_kernels(), weights="packed")
    return Subject.of(loaded, NUM_PROMPTS, every=EVERY)


@pytest.mark.parametrize("way", WAYS)
def test_a_position_has_the_same_bits_however_it_is_computed(
    default: Subject, way: str, tmp_path: Path
) -> None:
    assert_same(default.shortest(SHORTEST.get(way, NUM_PROMPTS)), way, tmp_path)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Q4_1", torch.float32),
        ("Q4_1-int8", torch.bfloat16),
        ("Q8_0", torch.bfloat16),
        ("Q8_0-int8", torch.float32),
        ("Q4_K", torch.bfloat16),
        ("Q4_1-kv8", torch.bfloat16),
        ("Q4_K-int8-kv8", torch.bfloat16),
        ("dense-kv8", torch.float32),
        (DENSE, torch.bfloat16),
        (DENSE, torch.float32),
    ],
    ids=str,
)
def test_it_has_the_same_bits_with_weights_of_every_kind(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loaded = small_model(tmp_path, kind, dtype)
    assert loaded.card.numerics
    subject = Subject.of(loaded, NUM_PROMPTS, every=EVERY)
    for way in SMALL_WAYS:
        assert_same(subject, way, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OF_LAYERS)
def test_it_has_the_same_bits_in_models_that_one_call_cannot_compute(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """One prompt has no adapter, and the others have one of two. The longest prompt is computed in
    small chunks only in float32, because these take most of the time."""
    loaded = small_model(tmp_path, kind, dtype)
    assert loaded.model.whole is None
    assert loaded.card.numerics
    adapters = [random_adapter(loaded, seed=seed, rank=5) for seed in range(2)]
    subject = Subject.of(loaded, NUM_PROMPTS, every=EVERY, adapters=adapters)
    short = subject if dtype == torch.float32 else subject.shortest(NUM_PROMPTS - 1)
    for way in ways_for(loaded, (*SMALL_WAYS, "n-gram drafts")):
        assert_same(short if way == "chunks of 7" else subject, way, tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes"), [("lru", {"lru_width": 192}), ("latent", {"qk_nope_head_dim": 24})]
)
def test_bits_are_not_promised_if_torch_multiplies_the_matrices_of_heads(
    kind: str, changes: dict[str, int], tmp_path: Path
) -> None:
    """Matrices of 24 columns cannot be packed."""
    model_type, sizes = OF_LAYERS[kind]
    path = write_directory(tmp_path, random_model(model_type, **sizes | changes))
    loaded = load(path, kernels=native_kernels(), weights="packed")
    assert {type(each) for each in linears_in(loaded.model.weights)} == {PackedLinear, Dense}
    assert not loaded.card.numerics


@pytest.fixture(scope="module", params=["hybrid", "shared", "streams", "selected"])
def such_a_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    loaded = small_model(tmp_path_factory.mktemp("model"), request.param, torch.float32)
    return Subject.of(loaded, NUM_PROMPTS, every=EVERY)


@pytest.mark.parametrize("way", WAYS)
def test_a_position_of_such_a_model_has_the_same_bits_however_it_is_computed(
    such_a_model: Subject, way: str, tmp_path: Path
) -> None:
    if not ways_for(such_a_model.loaded, [way]):
        pytest.skip("a model with recurrent layers cannot be a draft model")
    assert_same(such_a_model.shortest(SHORTEST.get(way, NUM_PROMPTS)), way, tmp_path)


ADAPTED_KINDS = [
    ("Q4_1", torch.float32),
    ("Q4_1-int8", torch.bfloat16),
    ("Q8_0-int8-kv8", torch.bfloat16),
    (DENSE, torch.bfloat16),
    (DENSE, torch.float32),
]


@pytest.mark.parametrize(("kind", "dtype"), ADAPTED_KINDS, ids=str)
def test_it_has_the_same_bits_beside_requests_with_other_adapters(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loaded = small_model(tmp_path, kind, dtype)
    adapters = [random_adapter(loaded, seed=seed, rank=3 * seed + 1) for seed in range(8)]
    subject = Subject.of(loaded, 10, every=EVERY, adapters=adapters)
    assert [*sorted(subject.names)] == ["", "", *map(str, range(8))]
    for way in ("chunks of 7", "in a batch", "other threads", "preempted", "n-gram drafts"):
        assert_same(subject, way, tmp_path)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    loaded = small_model(tmp_path_factory.mktemp("model"), "Q4_1", torch.float32)
    adapters = [random_adapter(loaded, seed=seed, rank=5) for seed in range(2)]
    return Subject.of(loaded, NUM_PROMPTS, every=EVERY, adapters=adapters)


@pytest.mark.parametrize("way", WAYS)
def test_a_position_with_an_adapter_has_the_same_bits_however_it_is_computed(
    adapted: Subject, way: str, tmp_path: Path
) -> None:
    """Slow ways compute all prompts but the longest."""
    number = NUM_PROMPTS - 1 if way in SHORTEST else NUM_PROMPTS
    assert_same(adapted.shortest(number), way, tmp_path)


def test_requests_without_an_adapter_have_the_bits_of_a_server_without_adapters(
    tmp_path: Path,
) -> None:
    loaded = small_model(tmp_path, "Q4_1-int8", torch.bfloat16)
    adapters = [random_adapter(loaded, seed=seed) for seed in range(3)]
    plain = Subject.of(loaded, 8)
    mixed = Subject.of(loaded, 8, adapters=adapters)
    for case in together(mixed, tmp_path):
        same = (case.answer == plain.alone[case.prompt], mixed.names[case.prompt] == "")
        assert same in [(True, True), (False, False)]


def assert_same(subject: Subject, way: str, folder: Path) -> None:
    cases = [*WAYS[way](subject, folder)]
    assert cases
    assert all(map(subject.is_same, cases))


def test_the_fingerprint_says_what_is_rounded(tmp_path: Path) -> None:
    kinds = ("Q4_1", "Q4_1-int8", "Q4_1-kv8", "Q4_1-int8-kv8")
    cards = [small_model(tmp_path / kind, kind, torch.bfloat16).card for kind in kinds]
    assert all(card.numerics for card in cards)
    assert len({card.numerics for card in cards}) == len(kinds)
    assert len({card.digest for card in cards}) == 1
