"""Blocks on disk are loaded whole and unchanged or not at all, and never exceed the limit."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from worker.kv.tiers.disk import (
    HEADER_BYTES,
    PAUSE_S,
    SCAN_S,
    BlockLost,
    DamagedBlockFile,
    DiskTier,
    StoredLayout,
    check_block_file,
    make_header,
)

LAYOUT, OTHER = b"l" * 16, b"o" * 16
SIZE = 64
FILE = HEADER_BYTES + SIZE


def content(number: int) -> bytes:
    return sha256(bytes([number])).digest()


def payload(number: int) -> list[bytes]:
    """Return the payload of a block, in two parts."""
    return [bytes([number]) * 20, bytes([number]) * (SIZE - 20)]


def whole(number: int) -> bytes:
    return bytes([number]) * SIZE


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def disk(root: Path, *, blocks: int = 4, layout: bytes = LAYOUT, **more: Any) -> DiskTier:
    stored = StoredLayout(layout, SIZE)
    return DiskTier(root, stored, more.pop("states", None), max_bytes=blocks * FILE, **more)


def store(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.store(content(number), payload(number))


def loaded(tier: DiskTier, number: int) -> bytes:
    into = bytearray(SIZE)
    parts = [memoryview(into)[:7], memoryview(into)[7:]]
    tier.load(content(number), parts)
    return bytes(into)


def path_of(root: Path, number: int, layout: bytes = LAYOUT) -> Path:
    return root / layout.hex() / content(number).hex()


def age(root: Path, *numbers: int, layout: bytes = LAYOUT) -> None:
    """Set old modification times on the files of these blocks, the first one being the oldest."""
    for when, number in enumerate(numbers):
        os.utime(path_of(root, number, layout), (1000 + when, 1000 + when))


# ---- the file
def test_the_bytes_of_a_file_do_not_change() -> None:
    header = make_header(LAYOUT, b"c" * 32, [b"pay", b"load"])
    fields = b"tidegate" + b"\1\0\0\0" + b"\7\0\0\0\0\0\0\0" + LAYOUT + b"c" * 32
    assert header == fields + sha256(fields + b"payload").digest()
    assert len(header) == HEADER_BYTES
    check_block_file(header, [b"payload"], LAYOUT, b"c" * 32)


def test_a_file_with_any_flipped_bit_is_damaged_and_deleted(tmp_path: Path) -> None:
    tier, path = disk(tmp_path / "kv"), path_of(tmp_path / "kv", 1)
    for byte in range(FILE):
        assert tier.store(content(1), payload(1))
        file = path.read_bytes()
        path.write_bytes(file[:byte] + bytes([file[byte] ^ 1 << byte % 8]) + file[byte + 1 :])
        with pytest.raises(DamagedBlockFile):
            loaded(tier, 1)
        assert not path.exists()
        assert content(1) not in tier


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1, FILE + 1])
def test_a_file_of_another_size_is_damage(tmp_path: Path, size: int) -> None:
    tier, path = disk(tmp_path / "kv"), path_of(tmp_path / "kv", 1)
    store(tier, 1)
    path.write_bytes((path.read_bytes() + b"x")[:size])
    with pytest.raises(DamagedBlockFile, match=f"{size} bytes instead of {FILE}"):
        loaded(tier, 1)
    assert not path.exists()


def test_a_whole_file_under_another_name_is_damage(tmp_path: Path) -> None:
    tier = disk(tmp_path / "kv")
    store(tier, 1)
    path_of(tmp_path / "kv", 1).rename(path_of(tmp_path / "kv", 2))
    with pytest.raises(DamagedBlockFile, match="does not match this block"):
        loaded(tier, 2)


# ---- storing and loading
def test_a_stored_block_can_be_loaded_by_the_next_server(tmp_path: Path) -> None:
    first = disk(tmp_path / "kv")
    assert first.store(content(1), payload(1))
    assert loaded(first, 1) == whole(1)
    second = disk(tmp_path / "kv")
    assert second.drain_changes() == ([content(1)], [])
    assert loaded(second, 1) == whole(1)


def test_block_files_are_private_to_their_owner(tmp_path: Path) -> None:
    tier = disk(tmp_path / "kv")
    store(tier, 1)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in sorted((tmp_path / "kv").rglob("*"))]
    assert modes == [0o700, 0o600]
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only its owner"):
        disk(tmp_path / "kv")


def test_a_deleted_block_file_is_reported_as_lost(tmp_path: Path) -> None:
    tier = disk(tmp_path / "kv")
    store(tier, 1)
    tier.drain_changes()
    path_of(tmp_path / "kv", 1).unlink()
    with pytest.raises(BlockLost, match="no longer exists"):
        loaded(tier, 1)
    assert tier.drain_changes() == ([], [content(1)])


# ---- the limit
def test_the_least_recently_used_block_is_evicted_at_the_limit(tmp_path: Path) -> None:
    tier = disk(tmp_path / "kv", blocks=3)
    store(tier, 1, 2, 3)
    loaded(tier, 1)
    store(tier, 4)
    assert [content(number) in tier for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert not path_of(tmp_path / "kv", 2).exists()
    assert tier.num_bytes == 3 * FILE


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    tier = disk(tmp_path / "kv")
    store(tier, 1, 2, 3)
    age(tmp_path / "kv", 3, 1, 2)
    tier.touch(content(3))
    again = disk(tmp_path / "kv", blocks=2)
    assert [content(number) in again for number in (1, 2, 3)] == [False, True, True]
    assert not path_of(tmp_path / "kv", 1).exists()


def test_blocks_of_another_model_count_towards_the_limit_and_are_not_loaded(tmp_path: Path) -> None:
    other = disk(tmp_path / "kv", layout=OTHER)
    store(other, 1, 2, 3)
    age(tmp_path / "kv", 1, 2, 3, layout=OTHER)
    tier = disk(tmp_path / "kv", blocks=3)
    assert tier.drain_changes() == ([], [])
    assert tier.num_bytes == 3 * FILE
    store(tier, 4)
    assert not path_of(tmp_path / "kv", 1, OTHER).exists()
    assert path_of(tmp_path / "kv", 2, OTHER).exists()
    with pytest.raises(BlockLost):
        loaded(tier, 2)


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="less than one block"):
        disk(tmp_path / "kv", blocks=0)


# ---- several servers
def test_two_servers_see_each_others_changes_and_keep_the_limit(tmp_path: Path) -> None:
    clock = Clock()
    one, two = (disk(tmp_path / "kv", blocks=3, clock=clock) for _ in range(2))
    store(one, 1, 2, 3)
    age(tmp_path / "kv", 1, 2, 3)
    store(two, 4)
    two.scan_if_due()  # the server has written a third of the limit
    assert set(two.drain_changes()[0]) == {content(number) for number in (2, 3, 4)}
    one.drain_changes()
    clock.now += SCAN_S
    one.scan_if_due()
    assert one.drain_changes() == ([content(4)], [content(1)])
    assert one.num_bytes == two.num_bytes == 3 * FILE


def test_the_same_block_written_by_two_servers_is_one_whole_file(tmp_path: Path) -> None:
    one, two = disk(tmp_path / "kv"), disk(tmp_path / "kv")
    assert one.store(content(1), payload(1))
    assert two.store(content(1), payload(1))
    assert loaded(one, 1) == loaded(two, 1) == whole(1)
    assert len(list((tmp_path / "kv" / LAYOUT.hex()).iterdir())) == 1


def test_four_servers_at_once_load_only_what_was_stored(tmp_path: Path) -> None:
    """The servers are threads, which share no more than processes would: each has its own tier."""

    def serve(seed: int) -> int:
        rng, tier, num_loaded = random.Random(seed), disk(tmp_path / "kv", blocks=8), 0
        for _ in range(300):
            number = rng.randrange(12)
            match rng.randrange(4):
                case 0 | 1:
                    assert tier.store(content(number), payload(number))
                case 2:
                    with contextlib.suppress(BlockLost):
                        assert loaded(tier, number) == whole(number)
                        num_loaded += 1
                case 3:
                    tier.scan()
        return num_loaded

    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(serve, range(4))) > 10
    tier = disk(tmp_path / "kv", blocks=8)
    left, _ = tier.drain_changes()
    assert 0 < tier.num_bytes <= 8 * FILE
    for number in range(12):
        if content(number) in left:
            assert loaded(tier, number) == whole(number)
    names = [path.name for path in (tmp_path / "kv" / LAYOUT.hex()).iterdir()]
    assert {bytes.fromhex(name) for name in names} == set(left)


def test_only_old_partial_files_are_deleted(tmp_path: Path) -> None:
    tier = disk(tmp_path / "kv")
    old, new = (tmp_path / "kv" / LAYOUT.hex() / name for name in (".old.part", ".new.part"))
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    tier.scan()
    assert (old.exists(), new.exists()) == (False, True)


def test_unknown_files_are_not_deleted(tmp_path: Path) -> None:
    tier = disk(tmp_path / "kv")
    strange = [tmp_path / "kv" / "README", tmp_path / "kv" / LAYOUT.hex() / "notes"]
    for path in strange:
        path.write_text("mine")
    (tmp_path / "kv" / "lost+found").mkdir()
    tier.scan()
    assert tier.num_bytes == 0
    assert all(path.exists() for path in strange)


# ---- a disk that fails
def test_a_full_disk_is_logged_once_and_retried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tier = disk(tmp_path / "kv", clock=clock)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        assert not tier.store(content(1), payload(1))
        clock.now += PAUSE_S + 1
        assert not tier.store(content(1), payload(1))
    assert not tier.store(content(1), payload(1))  # the pause
    clock.now += PAUSE_S + 1
    assert tier.store(content(1), payload(1))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "No space left" in messages[0]
    assert "again" in messages[1]
    assert [path.name for path in (tmp_path / "kv" / LAYOUT.hex()).iterdir()] == [content(1).hex()]


def test_a_directory_that_was_moved_away_is_created_again(tmp_path: Path) -> None:
    clock = Clock()
    tier = disk(tmp_path / "kv", clock=clock)
    store(tier, 1)
    tier.drain_changes()
    (tmp_path / "kv").rename(tmp_path / "away")
    assert not tier.store(content(2), payload(2))
    clock.now += PAUSE_S + SCAN_S
    tier.scan_if_due()
    assert tier.drain_changes() == ([], [content(1)])
    assert tier.store(content(2), payload(2))
    assert loaded(tier, 2) == whole(2)
