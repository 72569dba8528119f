"""The paged cache and its blocks as bytes. Both ends of a transfer cut the same chunks, blocks are
written to the right places, and two layouts are equal only if their caches are."""

from __future__ import annotations

import gc
import mmap
import os

import msgspec
import numpy as np
import pytest
import torch

from protocol.worker.kv_peers import ShmOffer
from tests.support.engines import a_card
from tests.support.pretended_device import DEVICE, PretendedDevice
from worker.kv.blocks import WHOLE, WORD_BYTES, DeviceBlocks, HostBlocks, memory_blocks
from worker.kv.cache import EmptyCache, KVCache, block_bytes
from worker.kv.layout import KVLayout
from worker.kv.movers.base import DamagedTransfer, TransferLost
from worker.kv.movers.shm import ShmMover
from worker.kv.movers.zmq import Cuts
from worker.kv.report_queue import ReportQueue
from worker.kv.rounding import numbers_of
from worker.kv.tiers.host import HostMemory, PlacedMemory
from worker.kv.tiers.store import StoredMemory, TierStore
from worker.kv.transfer.shared_memory import SharedMemory, map_offered
from worker.spec.facts import KVHeads

ROWS, BLOCKS, PIECE = 6, 11, 20
RANDOM = np.random.default_rng(4)


def rows_of(num_blocks: int = BLOCKS) -> np.ndarray:
    return RANDOM.integers(0, 256, (ROWS, num_blocks, PIECE), np.uint8)


# ---- cuts
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 30])
@pytest.mark.parametrize("max_bytes", [1, 8, 19, 20, 59, 119, 120, 121, 480, 10**6])
def test_every_byte_is_in_exactly_one_chunk_and_none_is_too_large(num_blocks, max_bytes):
    cuts = Cuts(num_rows=ROWS, piece_bytes=PIECE, num_blocks=num_blocks, max_bytes=max_bytes)
    times = np.zeros((ROWS, num_blocks, PIECE), int)
    for chunk in range(len(cuts)):
        cut = cuts[chunk]
        times[cut.first_row : cut.end_row, cut.first : cut.end, cut.part] += 1
        part = len(range(*cut.part.indices(PIECE)))
        rows, blocks = cut.shape
        assert 0 < rows * blocks * part <= max(max_bytes, WORD_BYTES)
        assert part == PIECE or cut.part.start % WORD_BYTES == 0
    assert (times == 1).all()


@pytest.mark.parametrize("chunk", [-1, 4, 10**12])
def test_a_chunk_that_does_not_exist_raises(chunk):
    cuts = Cuts(num_rows=ROWS, piece_bytes=PIECE, num_blocks=4, max_bytes=ROWS * PIECE)
    assert len(cuts) == 4
    with pytest.raises(IndexError, match=f"chunk {chunk} of 4"):
        cuts[chunk]


# ---- blocks
def test_gathered_blocks_are_put_into_the_named_rows_and_nowhere_else():
    theirs, ours = rows_of(), rows_of()
    before = ours.copy()
    pieces = HostBlocks(theirs).gather(2, 5, np.array([9, 1, 4]))
    HostBlocks(ours).put(2, 5, np.array([3, 8, 2]), pieces)
    before[2:5, [3, 8, 2]] = theirs[2:5, [9, 1, 4]]
    assert np.array_equal(ours, before)


def test_a_part_of_the_gathered_pieces_is_put_into_that_part_and_nowhere_else():
    theirs, ours, part = rows_of(), rows_of(), slice(8, 16)
    before = ours.copy()
    pieces = HostBlocks(theirs).gather(2, 5, np.array([9, 1, 4]), part)
    assert (pieces.shape, pieces.flags.c_contiguous) == ((3, 3, 8), True)
    HostBlocks(ours).put(2, 5, np.array([3, 8, 2]), pieces, part)
    before[2:5, [3, 8, 2], 8:16] = theirs[2:5, [9, 1, 4], 8:16]
    assert np.array_equal(ours, before)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((1, 5, 40), slice(8, 24)),
        ((1, 5, 44), slice(40, 48)),
        ((1, 5, 40), slice(32, 48)),
        ((3, 5, 16), WHOLE),
    ],
)
def test_a_device_moves_the_same_bytes_as_the_host(shape, part):
    """Parts that end after the last byte of a piece end with it."""
    before, source = (RANDOM.integers(0, 256, shape, np.uint8) for _ in range(2))
    ids, theirs, host = np.array([3, 1]), np.array([2, 4]), HostBlocks(before.copy())
    with PretendedDevice():
        rows = torch.from_numpy(before.copy()).to(DEVICE)
        device = DeviceBlocks(rows)
        pieces = host.gather(0, shape[0], ids, part)
        assert np.array_equal(device.gather(0, shape[0], ids, part), pieces)
        for blocks in (host, device):
            blocks.put(0, shape[0], theirs, pieces, part)
            blocks.copy(ids, source, theirs, part)
            blocks.synchronize()
        every = np.arange(5)
        assert np.array_equal(device.gather(0, shape[0], every), host.gather(0, shape[0], every))


@pytest.mark.parametrize("shape", [(1, 5, 44), (1, 5, 40), (2, 5, 8)])
def test_a_block_on_a_device_is_placed_in_host_memory_and_put_back(shape):
    rows = RANDOM.integers(0, 256, shape, np.uint8)
    with PretendedDevice():
        on_device = torch.from_numpy(rows.copy()).to(DEVICE)
        memory = HostMemory(16, 4, DEVICE)
        placed = PlacedMemory(on_device, DeviceBlocks(on_device), memory)
        places = tuple(range(placed.num_places))
        placed.copy_out(3, places)
        memory.mark().synchronize()
        assert b"".join(placed.payload(places)) == rows[:, 3].tobytes()
        placed.put(places, np.array([1]))
        found = DeviceBlocks(on_device).gather(0, shape[0], np.arange(5))
    rows[:, 1] = rows[:, 3]
    assert np.array_equal(found, rows)


@pytest.mark.parametrize(
    ("ids", "theirs"),
    [
        ([4], [7]),
        ([1, 2, 3], [5, 6, 7]),
        ([3, 2, 1], [5, 6, 7]),
        ([1, 2, 3, 9, 10], [7, 8, 2, 3, 4]),
        ([10, 1, 2, 8], [1, 2, 3, 4]),
    ],
)
def test_copying_runs_equals_copying_single_blocks(ids, theirs):
    source, ours = rows_of(13), rows_of()
    expected = ours.copy()
    expected[:, ids] = source[:, theirs]
    HostBlocks(ours).copy(np.array(ids), source, np.array(theirs))
    assert np.array_equal(ours, expected)
    ours = rows_of()
    expected = ours.copy()
    expected[:, ids, 8:] = source[:, theirs, 8:]
    HostBlocks(ours).copy(np.array(ids), source, np.array(theirs), slice(8, PIECE))
    assert np.array_equal(ours, expected)


def test_the_rows_of_a_cache_are_its_keys_and_values_block_by_block():
    cache = KVCache(3, 5, 4, 2, 8, torch.bfloat16, torch.device("cpu"))
    cache.k.normal_()
    cache.v.normal_()
    whole = torch.cat([cache.k, cache.v]).flatten(2).contiguous()
    assert torch.equal(cache.rows, whole.view(torch.uint8))


# ---- layouts
def test_a_state_takes_few_places_even_if_blocks_store_nothing() -> None:
    cache, states = torch.zeros(1, 9, 16, dtype=torch.uint8), torch.zeros(3, 100_000)
    rows = states.view(torch.uint8)[None]
    memories = (
        StoredMemory(cache, memory_blocks(cache), b"a" * 16),
        StoredMemory(rows, memory_blocks(rows), b"b" * 16),
    )
    place = 392  # 400,000 bytes / MAX_STATE_PLACES, in whole words
    reports = ReportQueue()
    with pytest.raises(ValueError, match=r"one recurrent state \(400,392 bytes\)"):
        TierStore(*memories, None, 1021 * place, reports)
    TierStore(*memories, None, 1022 * place, reports).close()
    reports.close()


def test_the_layout_of_a_model_without_attention_has_no_heads() -> None:
    card = a_card(digest="ab" * 32)
    layout = KVLayout.from_cache(card, EmptyCache(5, 16, torch.device("cpu")), 4000)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (0, 0, 0)
    assert layout.description == (
        "model abababababab, no K/V, 16 tokens a block, states of 4,000 bytes"
    )


LAYOUT = KVLayout(
    model="ab" * 32, dtype="float32", num_layers=2, num_kv_heads=3, head_dim=8, block_tokens=16
)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "ac" * 32},
        {"dtype": "bfloat16"},
        {"num_layers": 3},
        {"num_kv_heads": 8, "head_dim": 3},
        {"head_dim": 16},
        {"block_tokens": 4},
        {"state_bytes": 5},
    ],
)
def test_another_layout_has_another_digest_and_description(other):
    changed = msgspec.structs.replace(LAYOUT, **other)
    assert changed.digest != LAYOUT.digest
    assert changed.description != LAYOUT.description


def test_the_digest_of_a_layout_never_changes():
    assert LAYOUT.digest.hex() == "2167b93bc4acdeba68f2ae8107dceec7"
    assert LAYOUT.description == (
        "model abababababab, K/V in float32, 2 layers of 3 heads of 8, 16 tokens a block"
    )


def test_blocks_on_disk_are_found_only_by_the_kernels_that_computed_them():
    assert LAYOUT.stored_digest("") == LAYOUT.digest
    digests = {LAYOUT.digest, LAYOUT.stored_digest("0f1e2d3c"), LAYOUT.stored_digest("0f1e2d3d")}
    assert len(digests) == 3


# ---- shared memory
def test_shared_blocks_are_mapped_read_only():
    memory = SharedMemory(8192)
    assert not memory.content.any(), "zero at first"
    found = map_offered(memory.offer(1))
    memory.content[4100] = 7
    assert found[4100] == 7
    with pytest.raises(TypeError):
        found[0] = 1
    path = memory.offer(1).path
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(PermissionError), mmap.mmap(fd, 8192):
        pass  # sealed: only its owner writes
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_mapping_remains_valid_after_its_memory_is_deleted():
    memory = SharedMemory(4096)
    memory.content[0] = 9
    offer = memory.offer(1)
    found = map_offered(offer)
    del memory
    gc.collect()
    assert found[0] == 9
    with pytest.raises(TransferLost):
        map_offered(offer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"boot": "another"},
        {"inode": 1},
        {"device": 99},
        {"num_bytes": 100},
        {"path": "/proc/1/fd/99999"},
        {"path": f"/proc/{os.getpid()}/exe"},
        {"path": "/dev/zero"},
    ],
)
def test_memory_that_was_not_offered_is_not_mapped(wrong):
    memory = SharedMemory(4096)
    with pytest.raises(TransferLost):
        map_offered(msgspec.structs.replace(memory.offer(1), **wrong))


def test_memory_that_could_shrink_is_not_mapped():
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    info = os.fstat(fd)
    offer = msgspec.structs.replace(
        SharedMemory(4096).offer(1),
        path=f"/proc/self/fd/{fd}",
        device=info.st_dev,
        inode=info.st_ino,
    )
    with pytest.raises(TransferLost, match="not sealed"):
        map_offered(offer)
    os.close(fd)


@pytest.mark.parametrize(
    ("theirs", "changed"), [([1, BLOCKS], {}), ([-1], {}), ([1], {"num_blocks": 4})]
)
def test_an_offer_that_contradicts_itself_is_damage(theirs, changed):
    memory = SharedMemory(ROWS * BLOCKS * PIECE)
    offer: ShmOffer = msgspec.structs.replace(memory.offer(BLOCKS), **changed)
    blocks = HostBlocks(rows_of())
    with pytest.raises(DamagedTransfer):
        ShmMover(blocks, np.arange(1, len(theirs) + 1), np.array(theirs), offer)


# ---- the cache
SHAPE = (3, 5, 4, 2, 8)


def cache_of_ones() -> KVCache:
    cache = KVCache(*SHAPE, torch.float32, torch.device("cpu"))
    cache.k.fill_(1)
    cache.v.fill_(1)
    return cache


def test_a_new_cache_is_zero_and_has_the_requested_shape() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(*SHAPE, dtype, torch.device("cpu"))
        for tensor in (cache.k, cache.v):
            assert (tensor.shape, tensor.dtype) == (SHAPE, dtype)
            assert not tensor.any()
        assert (cache.num_blocks, cache.block_tokens) == (5, 4)


def test_tokens_are_written_at_their_slot_mapping_and_in_their_layer_only() -> None:
    cache = cache_of_ones()
    k, v = torch.full((2, 2, 8), 5.0), torch.full((2, 2, 8), 7.0)
    cache.write(1, k, v, torch.tensor([4 * 4 + 3, 2 * 4]))
    for tensor, value in ((cache.k, 5), (cache.v, 7)):
        assert (tensor[1, 4, 3] == value).all()
        assert (tensor[1, 2, 0] == value).all()
        assert (tensor == value).sum() == 2 * 2 * 8


def test_zeroing_a_block_clears_it_in_every_layer_and_leaves_the_others() -> None:
    cache = cache_of_ones()
    cache.zero(torch.tensor([1, 4]))
    for tensor in (cache.k, cache.v):
        assert not tensor[:, [1, 4]].any()
        assert tensor[:, [0, 2, 3]].all()


def test_zeroing_no_block_changes_nothing() -> None:
    cache = cache_of_ones()
    cache.zero(torch.tensor([], dtype=torch.int64))
    assert cache.k.all()


def test_block_bytes_is_the_size_of_a_block_in_the_tensors() -> None:
    cache = KVCache(*SHAPE, torch.bfloat16, torch.device("cpu"))
    size = block_bytes(3, 4, KVHeads(2, 8), torch.bfloat16)
    assert 5 * size == cache.k.nbytes + cache.v.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_latent_head_is_stored_once(dtype: torch.dtype) -> None:
    cache = KVCache(3, 5, 4, 1, 8, dtype, torch.device("cpu"), is_latent=True)
    keys, values = cache.layer(1)
    assert keys is values
    assert 5 * block_bytes(3, 4, KVHeads(1, 8, is_latent=True), dtype) == cache.k.nbytes
    assert cache.rows.shape == (3, 5, cache.k[0, 0].nbytes)
    latents = torch.arange(1, 17, dtype=torch.bfloat16).reshape(2, 1, 8)
    cache.write(1, latents, None, torch.tensor([9, 10]))
    assert (numbers_of(keys, torch.float32).flatten(0, 1)[9:11].flatten().ne(0)).all()
    cache.zero(torch.tensor([2]))
    assert not cache.rows.any()
