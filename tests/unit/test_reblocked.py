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
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", sorted(ROUNDED), ids=lambda kind: kind.name)
def test_other_types_are_rounded_to_a_fraction_of_the_largest_number(kind: GGMLType) -> None:
    raw = random_blocks(kind, BLOCKS)
    theirs = numbers(raw, kind)
    largest = np.abs(theirs).max(axis=1, keepdims=True)
    step = 127 * 2.0**-25  # of the smallest float16 scales
    assert (np.abs(after(raw, kind) - theirs) <= largest * 0.6 / 127 + step).all()


@pytest.mark.parametrize("kind", [*EXACT, *sorted(ROUNDED)], ids=lambda k: k.name)
def test_a_scale_that_is_not_finite_stays_so(kind: GGMLType) -> None:
    """The matrix is then dequantised, and a request whose logits are not finite fails."""
    raw = random_blocks(kind, BLOCKS)
    damaged = np.array([np.nan], np.float16).view(np.uint8)
    if kind is GGMLType.MXFP4:
        raw[0, 0] = 255
    elif kind is GGMLType.Q2_K:
        raw[0, -4:-2] = damaged
    else:
        raw[0, :2] = damaged
    found = target(kind)
    assert found is not None
    assert not QuantBlocks(found, reblocked(kind, raw, flat_numbers)[:, None]).is_sound


@pytest.mark.parametrize("kind", BlockKind)
def test_a_matrix_with_a_scale_that_is_not_finite_is_not_sound(kind: BlockKind) -> None:
    raw = random_blocks(GGMLType[kind.name], BLOCKS)[:, None]
    assert QuantBlocks(kind, raw).is_sound
    scales = raw[:, :, kind.scale_bytes]
    for at in range(0, scales.shape[2], 2):
        damaged = raw.copy()
        odd = np.array([np.inf, -np.inf, np.nan], np.float16).view(np.uint8).reshape(3, 2)
        damaged[5, 0, kind.scale_bytes][at : at + 2] = odd[at // 2]
        assert not QuantBlocks(kind, damaged).is_sound


def test_the_memory_plan_has_the_same_types() -> None:
    for kind in GGMLType:
        found, planned = target(kind), PACKED_AS.get(kind.name)
        assert (None if found is None else found.name) == (kind.name if planned == "" else planned)


def test_types_of_single_numbers_have_no_blocks() -> None:
    assert target(GGMLType.F16) is None
    assert target(GGMLType.TQ1_0) is None
