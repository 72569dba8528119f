"""The file with a cluster's key, and what follows from it."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
import zmq

from protocol.cluster_key import ClusterKey, KeyPair, read_cluster_key, write_cluster_key


def file_with(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def secret_in(path: str) -> bytes:
    key = read_cluster_key(path)
    assert key is not None
    return key.derive("test")


def test_no_path_is_no_key() -> None:
    assert read_cluster_key("") is None


def test_a_written_key_can_be_read_by_its_owner_alone_and_is_never_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    write_cluster_key(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert secret_in(path) == secret_in(path)
    with pytest.raises(FileExistsError):
        write_cluster_key(path)
    write_cluster_key(str(tmp_path / "other"))
    assert secret_in(path) != secret_in(str(tmp_path / "other"))


def test_bytes_and_their_base64_are_the_same_key(tmp_path: Path) -> None:
    raw = bytes(range(200, 232))
    keys = {secret_in(file_with(tmp_path, raw))}
    text = base64.urlsafe_b64encode(raw)
    for spelling in (text, text + b"\n", text.rstrip(b"=") + b"\r\n"):
        keys.add(secret_in(file_with(tmp_path, spelling)))
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"", 0o600, "0 bytes"),
        (b"\xff" * 31, 0o600, "31 bytes"),
        (b"0123456789abcdef" * 2, 0o600, "24 bytes"),  # hex digits are letters of base64, too
        (b"a" * 45, 0o600, "not valid base64"),
        (b"\xff" * 5000, 0o600, "not a key"),
        (b"\xff" * 32, 0o640, "0600"),
        (b"\xff" * 32, 0o604, "0600"),
        (b"\xff" * 32, 0o700, "0600"),
    ],
)
def test_a_weak_or_open_file_is_refused_in_a_line_that_names_it(
    tmp_path: Path, content: bytes, mode: int, why: str
) -> None:
    path = file_with(tmp_path, content, mode)
    with pytest.raises(ValueError, match=why) as caught:
        read_cluster_key(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: No such file"):
        read_cluster_key(str(tmp_path / "nowhere"))


def test_each_purpose_has_a_secret_of_its_own() -> None:
    key = ClusterKey(b"k" * 32)
    assert key.derive("a") == ClusterKey(b"k" * 32).derive("a")
    assert len({key.derive("a"), key.derive("b"), ClusterKey(b"l" * 32).derive("a")}) == 3
    assert key.server != key.client
    for pair in (key.server, key.client):
        assert pair.public == zmq.curve_public(pair.secret)


def test_a_key_pair_does_not_show_its_secret() -> None:
    pair = ClusterKey(b"k" * 32).server
    assert repr(pair) == f"KeyPair({pair.public.decode()})"
    assert str(KeyPair(b"public", b"secret")) == "KeyPair(public)"
