"""The arithmetic behind the figures of `python -m tests.gpu`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from tests.gpu.accuracy import Agreement
from tests.gpu.checkpoints import write_checkpoint
from tests.gpu.kernels import row_of
from tests.gpu.session import CONFIGS
from tests.gpu.steps import bytes_read, waits_us
from tests.support.replica import new_cache
from worker.loading.decoder import load_model
from worker.loading.header import ModelHeader, read_header

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("cases", "outcome", "text"),
    [
        ("<testcase name='a'/><testcase name='b'><skipped/></testcase>", "passed", "1 of 1"),
        ("<testcase name='a'/><testcase name='b'><failure/></testcase>", "failed", "1 of 2"),
        ("<testcase name='a'><error/></testcase>", "failed", "0 of 1"),
        ("<testcase name='a'><skipped/></testcase>", "failed", "0 of 0"),
        ("", "failed", "0 of 0"),
    ],
)
def test_a_part_passes_if_some_test_ran_and_none_failed(
    cases: str, outcome: str, text: str
) -> None:
    row = row_of("layers", [*ElementTree.fromstring(f"<testsuite>{cases}</testsuite>")])
    assert row.outcome == outcome
    assert row.text.startswith(text)


def test_waits_are_the_gaps_that_no_span_covers() -> None:
    spans = [(30.0, 40.0), (0.0, 10.0), (5.0, 20.0), (6.0, 7.0)]
    assert [*waits_us(spans)] == [10.0]


def test_the_gaps_between_kernels_of_a_graph_are_no_waits() -> None:
    assert [*waits_us([(0.0, 1.0), (3.0, 4.0), (9.0, 10.0)])] == [5.0]


def test_without_work_there_is_no_wait() -> None:
    assert [*waits_us([])] == []


def test_agreement_compares_the_most_likely_tokens() -> None:
    exact = torch.tensor([[0.0, -1.0], [-2.0, -0.5]])
    found = torch.tensor([[-0.25, -1.0], [-0.5, -0.75]])
    assert Agreement.of(found, exact) == Agreement(error=0.25, max_error=0.25, equal=0.5)


def test_agreement_with_a_nan_is_within_no_limit() -> None:
    found: Tensor = torch.tensor([[float("nan"), 0.0]])
    assert not Agreement.of(found, torch.tensor([[0.0, -1.0]])).error <= 1e9


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_the_weights_without_embeddings_and_all_keys_and_values(
    tied: bool, tmp_path: Path
) -> None:
    config = json.loads((CONFIGS / "tiny.json").read_text()) | {"tie_word_embeddings": tied}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    loaded = load_model(path, dtype=torch.float32, device=CPU)
    hidden, inner, q, kv, vocab, layers = 64, 96, 64, 32, 97, 2
    matrices = layers * (hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner)
    norms = layers * (2 * hidden + 2 * 16) + hidden
    keys_and_values = 3 * 10 * 2 * layers * kv
    expected = 4 * (matrices + norms + vocab * hidden + keys_and_values)
    cache = new_cache(loaded, 4, 16)
    assert bytes_read(loaded.model, cache, batch=3, context=10) == expected  # type: ignore[arg-type]


def test_a_checkpoint_has_the_weights_that_its_config_describes(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS / "tiny.json", tmp_path / "model", CPU)
    header = read_header(folder)
    assert isinstance(header, ModelHeader)
    assert header.vocab_size == 97
    made, read = (
        load_model(path, dtype=torch.bfloat16, device=CPU).model
        for path in (CONFIGS / "tiny.json", folder)
    )
    assert all(
        one.shape == other.shape and (one - other).abs().max() < 0.1
        for one, other in zip(made.tensors(), read.tensors(), strict=True)  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("name", ["qwen3-8b", "smollm2-135m", "qwen3-small", "tiny"])
def test_each_config_is_supported(name: str) -> None:
    header = read_header(CONFIGS / f"{name}.json")
    assert isinstance(header, ModelHeader)
    total = sum(torch.Size(shape).numel() for shape in dict(header.tensors.tensors()).values())
    millions = {"qwen3-8b": 8191, "smollm2-135m": 135, "qwen3-small": 143, "tiny": 0}
    assert total // 1_000_000 == pytest.approx(millions[name], abs=1)
