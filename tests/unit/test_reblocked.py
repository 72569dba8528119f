"""GGUF's block types, turned into those of the kernels, keep their numbers."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tests.support.gguf_files import random_blocks
from worker.loading.gguf_file import GGMLType
from worker.loading.quant_blocks import (
    BLOCK_WEIGHTS,
    BlockKind,
    QuantBlocks,
    dequantized,
    stacked,
)
from worker.loading.reblocked import ROUNDED, UNITS, reblocked, target
from worker.startup.memory_plan import PACKED_AS

EXACT = sorted([*UNITS, GGMLType.MXFP4])
BLOCKS = 200


def numbers(raw: np.ndarray, kind: GGMLType) -> np.ndarray:
    """Return the numbers of the package `gguf`, in blocks of 32."""
    with np.errstate(all="ignore"):
        flat = quants.dequantize(raw.reshape(1, -1), GGMLQuantizationType(kind))
    return flat.reshape(-1, BLOCK_WEIGHTS)


def flat_numbers(raw: np.ndarray, kind: GGMLType) -> np.ndarray:
    return numbers(raw, kind).reshape(-1)


def after(raw: np.ndarray, kind: GGMLType) -> np.ndarray:
    found = target(kind)
    assert found is not None
    return dequantized(found, reblocked(kind, raw, flat_numbers))


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_types_of_integers_times_a_scale_keep_their_numbers(kind: GGMLType) -> None:
    raw = random_blocks(kind, BLOCKS)
    ours, theirs = after(raw, kind), numbers(raw, kind)
    if kind is GGMLType.Q3_K:  # -32 * -4 is one more than a signed byte holds
        largest = np.abs(theirs).max(axis=1, keepdims=True)
        assert (np.abs(ours - theirs) <= largest / 127).all()
        assert (ours == theirs).mean() > 0.99
    else:
        assert np.array_equal(ours, theirs)


def test_q4_k_keeps_its_integers_and_rounds_its_scales_to_float16() -> None:
    raw = random_blocks(GGMLType.Q4_K, BLOCKS)
    theirs = numbers(raw, GGMLType.Q4_K)
    span = np.ptp(theirs, axis=1, keepdims=True) + np.abs(theirs).max(axis=1, keepdims=True)
    assert target(GGMLType.Q4_K) is BlockKind.Q4_1
    assert (np.abs(after(raw, GGMLType.Q4_K) - theirs) <= span * 2**-10).all()


@pytest.mark.parametrize("kind", sorted(ROUNDED), ids=lambda kind: kind.name)
def test_other_types_are_rounded_to_a_fraction_of_the_largest_number(kind: GGMLType) -> None:
    raw = random_blocks(kind, BLOCKS)
    theirs = numbers(raw, kind)
    largest = np.abs(theirs).max(axis=1, keepdims=True)
    step = 127 * 2.0**-25  # of the smallest float16 scales
    assert (np.abs(after(raw, kind) - theirs) <= largest * 0.6 / 127 + step).all()


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, *EXACT, *sorted(ROUNDED)], ids=lambda k: k.name)
def test_a_scale_that_is_not_finite_stays_so(kind: GGMLType) -> None:
    """The matrix is then dequantised, and a request whose logits are not finite fails."""
    raw = random_blocks(kind, BLOCKS)
    damaged = np.array([np.nan], np.float16).view(np.uint8)
    if kind is GGMLType.MXFP4:
        raw[0, 0] = 255
    elif kind in (GGMLType.Q3_K, GGMLType.Q6_K):
        raw[0, -2:] = damaged
    elif kind is GGMLType.Q2_K:
        raw[0, -4:-2] = damaged
    else:
        raw[0, :2] = damaged
    found = target(kind)
    assert found is not None
    scales = reblocked(kind, raw, flat_numbers)[:, : 2 * found.num_scales]
    assert not np.isfinite(np.ascontiguousarray(scales).view(np.float16)).all()


def test_the_memory_plan_has_the_same_types() -> None:
    for kind in GGMLType:
        found, planned = target(kind), PACKED_AS.get(kind.name)
        assert (None if found is None else found.name) == (kind.name if planned == "" else planned)


def test_parts_of_different_types_are_stacked_as_the_widest() -> None:
    raws = {
        kind: random_blocks(kind, BLOCKS) for kind in (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0)
    }
    parts = [QuantBlocks(BlockKind[kind.name], raw[:, None]) for kind, raw in raws.items()]
    whole = stacked([*parts])
    assert whole is not None
    assert whole.kind is BlockKind.Q8_0
    ours = dequantized(whole.kind, whole.raw[:, 0])
    theirs = np.concatenate([numbers(raw, kind) for kind, raw in raws.items()])
    largest = np.abs(theirs).max(axis=1, keepdims=True)
    assert (np.abs(ours - theirs) <= largest * 0.6 / 127).all()
    assert np.array_equal(ours[-BLOCKS:], theirs[-BLOCKS:])


def test_types_of_single_numbers_have_no_blocks() -> None:
    assert target(GGMLType.F16) is None
    assert target(GGMLType.TQ1_0) is None
