"""Quantised blocks of GGUF files: which types stay packed, and which scales are refused."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tests.support.gguf_files import random_blocks
from worker.checkpoint import mxfp4
from worker.checkpoint.gguf_file import GGMLType
from worker.checkpoint.quant_blocks import BlockKind, QuantBlocks
from worker.spec.kernel_sizes import BLOCK_FORMATS

BLOCKS = 200


@pytest.mark.parametrize("kind", BlockKind)
def test_a_block_has_the_weights_and_bytes_of_its_type(kind: BlockKind) -> None:
    assert kind.weights == GGMLType[kind.name].block[0]
    raw = random_blocks(GGMLType[kind.name], BLOCKS).reshape(10, 20, -1)
    assert QuantBlocks(kind, raw).inputs == 20 * kind.weights


@pytest.mark.parametrize("kind", BlockKind)
def test_a_matrix_with_a_scale_that_is_not_finite_is_not_sound(kind: BlockKind) -> None:
    raw = random_blocks(GGMLType[kind.name], BLOCKS)[:, None]
    assert QuantBlocks(kind, raw).is_sound
    scales = raw[:, :, kind.scale_bytes]
    for at in range(0, scales.shape[2], 2):
        damaged = raw.copy()
        odd = np.array([np.inf, -np.inf, np.nan], np.float16).view(np.uint8).reshape(3, 2)
        if kind is BlockKind.MXFP4:
            odd = np.array([[255]])
        damaged[5, 0, kind.scale_bytes][at : at + 2] = odd[at // 2]
        assert not QuantBlocks(kind, damaged).is_sound


def test_the_kernels_have_a_format_for_each_type() -> None:
    assert BLOCK_FORMATS.keys() == BlockKind.__members__.keys()


def test_blocks_of_mxfp4_keep_their_numbers_in_the_order_of_gguf_files() -> None:
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (BLOCKS, 16), dtype=np.uint8)
    scales = np.arange(BLOCKS, dtype=np.uint8)
    found = quants.dequantize(mxfp4.gguf_blocks(blocks, scales), GGMLQuantizationType.MXFP4)
    assert np.array_equal(found, mxfp4.values(mxfp4.integers(blocks), scales))
