"""Files through the official SDK and by hand: uploads, bounds, lists, and who may see them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai import OpenAI

from gateway.store.batch_database import BatchDatabase
from gateway.store.batch_queries import NewFile
from tests.integration.batches.conftest import client_of
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, json_of
from tests.support.processes import descendants_of, rss_mib
from tests.support.scripted_engine import ScriptedEngine

FILES = "/v1/files"
KEY = {"Authorization": "Bearer k1"}
MIB = 1 << 20


def uploaded(client: OpenAI, data: bytes = b"{}\n", name: str = "in.jsonl", **options: Any) -> Any:
    return client.files.create(file=(name, data), purpose="batch", **options)


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, 3 * MIB + 7])
def test_a_file_comes_back_byte_by_byte(client: OpenAI, size: int) -> None:
    data = random.Random(size).randbytes(size)
    file = uploaded(client, data, "ü.jsonl")
    assert (file.bytes, file.filename, file.purpose) == (size, "ü.jsonl", "batch")
    assert file.status == "processed"
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    assert client.files.delete(file.id).deleted
    for attempt in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(file.id)


def test_a_file_that_contains_boundaries_and_line_breaks_is_kept(
    gateway: GatewayProcess, client: OpenAI
) -> None:
    content = b"\r\n--bound\r\r\n\n--bounda\r\n-\r\n--boundary"
    body = (
        b"preamble\r\n--boundaryX\r\n"
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--boundaryX\r\n'
        b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + content
        + b"\r\n--boundaryX--\r\nepilogue"
    )
    headers = {**KEY, "Content-Type": "multipart/form-data; boundary=boundaryX"}
    answer = requests.post(gateway.url + FILES, data=body, headers=headers, timeout=20)
    assert client.files.content(json_of(answer)["id"]).read() == content


def test_files_are_listed_in_pages_by_purpose_and_order(
    gateway: GatewayProcess, client: OpenAI
) -> None:
    with client_of(gateway, "lister") as lister:
        ids = [uploaded(lister, name=str(n)).id for n in range(5)]
        assert [f.id for f in lister.files.list(limit=2)] == ids[::-1]
        assert [f.id for f in lister.files.list(limit=2, order="asc")] == ids
        page = lister.files.list(limit=3, after=ids[4], order="desc")
        assert ([f.id for f in page.data], page.has_more) == (ids[3:0:-1], True)
        assert lister.files.list(purpose="batch_output").data == []
        with pytest.raises(openai.BadRequestError, match="limit: must be a whole number"):
            lister.files.list(limit=0)


def test_files_belong_to_their_owner(client: OpenAI, stranger: OpenAI) -> None:
    file = uploaded(client)
    for attempt in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(file.id)
    assert file.id not in [each.id for each in stranger.files.list()]
    assert client.files.retrieve(file.id) == file


def test_a_file_has_an_expiry(client: OpenAI) -> None:
    kept = uploaded(client)
    assert kept.expires_at == pytest.approx(kept.created_at + 30 * 86400, abs=1)
    short = uploaded(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert short.expires_at == pytest.approx(short.created_at + 3600, abs=1)
    with pytest.raises(
        openai.BadRequestError, match=r"seconds.: must be a whole number from 3,600"
    ):
        uploaded(client, expires_after={"anchor": "created_at", "seconds": 60})


def multipart(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\nContent-Disposition: form-data; " + part for part in parts) + end


FILE = b'name="file"; filename="f"\r\n\r\n{}\r\n'
PURPOSE = b'name="purpose"\r\n\r\nbatch\r\n'


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (multipart(PURPOSE), 400, "file: this field is required"),
        (multipart(FILE), 400, "purpose: this field is required"),
        (
            multipart(FILE, b'name="purpose"\r\n\r\nevals\r\n'),
            400,
            'must be one of "batch", "vision"',
        ),
        (multipart(FILE, FILE, PURPOSE), 400, "file: the body must contain one file"),
        (multipart(PURPOSE, PURPOSE, FILE), 400, "purpose: this field is given twice"),
        (multipart(b'name="file"\r\n\r\n{}\r\n', PURPOSE), 400, "file: must be a file"),
        (multipart(b'name="x"\r\n\r\n' + b"y" * 5000 + b"\r\n"), 400, "x: this field is too long"),
        (multipart(FILE, PURPOSE, end=b""), 400, "malformed or truncated"),
        (multipart(*[b'name="x%d"\r\n\r\n1\r\n' % n for n in range(20)]), 400, "malformed"),
        (b"", 400, "malformed"),
        (b"x" * 1_000_000, 400, "malformed"),
        (multipart(b'name="file"; filename="f"\r\n' + b"A: b\r\n" * 90_000), 400, "malformed"),
        (multipart(b'name="file"; filename="f"\r\n\r\n' + bytes(4 * MIB + 1)), 413, "larger than"),
    ],
)
def test_a_malformed_form_is_refused_and_leaves_no_file(
    gateway: GatewayProcess, body: bytes, status: int, words: str
) -> None:
    headers = {"Authorization": "Bearer k3", "Content-Type": "multipart/form-data; boundary=b"}
    answer = requests.post(gateway.url + FILES, data=body, headers=headers, timeout=20)
    assert words in error_of(answer, status)["message"]
    listed = requests.get(gateway.url + FILES, headers=headers, timeout=20).json()
    assert listed["data"] == []


def test_other_bodies_are_refused(gateway: GatewayProcess) -> None:
    answer = requests.post(gateway.url + FILES, json={"purpose": "batch"}, timeout=20)
    assert answer.status_code == 415
    headers = {"Content-Type": "multipart/form-data"}
    answer = requests.post(gateway.url + FILES, data=b"x", headers=headers, timeout=20)
    assert answer.status_code == 415


def test_a_chunked_upload_is_refused_when_it_exceeds_the_limit(gateway: GatewayProcess) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(5 * MIB >> 16):
            yield bytes(1 << 16)

    headers = {"Authorization": "Bearer k4", "Content-Type": "multipart/form-data; boundary=b"}
    answer = requests.post(gateway.url + FILES, data=pieces(), headers=headers, timeout=20)
    assert answer.status_code == 413
    assert requests.get(gateway.url + FILES, headers=headers, timeout=20).json()["data"] == []


@pytest.fixture
def small(engine: ScriptedEngine, tmp_path: Any) -> Iterator[GatewayProcess]:
    options: dict[str, Any] = {"file_store": str(tmp_path / "f.db"), "files_per_key": 3}
    with GatewayProcess(engine=engine.address, file_store_mib=8, **options) as gateway:
        yield gateway.await_ready()


def test_a_key_has_a_limited_number_of_files_and_the_store_a_size(small: GatewayProcess) -> None:
    with client_of(small) as client:
        files = [uploaded(client, bytes(1000)) for _ in range(3)]
        with pytest.raises(openai.BadRequestError, match="at most 3 files"):
            uploaded(client)
        client.files.delete(files[0].id)
        with pytest.raises(openai.APIStatusError, match="the file store is full") as full:
            uploaded(client, bytes(9 * MIB))
        assert full.value.status_code == 413
        uploaded(client, bytes(6 * MIB))  # the pieces of the failed upload are gone


def test_a_full_store_takes_no_new_batches(small: GatewayProcess, tmp_path: Path) -> None:
    """Otherwise one input file, computed again and again, would fill the disk with results."""
    with client_of(small) as client:
        file = uploaded(client)
        other = BatchDatabase(str(tmp_path / "f.db"), max_bytes=64 * MIB, max_age_s=3600)
        with contextlib.closing(other):
            other.begin_file(NewFile("file-results", "somebody", "batch_output", "o"), 9, 0.0)
            other.add_piece("file-results", 0, bytes(9 * MIB))
        with pytest.raises(openai.APIStatusError, match="the file store is full") as full:
            client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
        assert full.value.status_code == 413


def test_an_upload_is_never_in_memory_as_a_whole(engine: ScriptedEngine, tmp_path: Any) -> None:
    options: dict[str, Any] = {"file_store": str(tmp_path / "f.db"), "file_max_mib": 256}
    with GatewayProcess(engine=engine.address, **options) as gateway, client_of(gateway) as client:
        gateway.await_ready()
        uploaded(client)
        pids = [gateway.process.pid, *(pid for pid, _ in descendants_of(gateway.process.pid))]
        before = sum(map(rss_mib, pids))
        file = uploaded(client, bytes(128 * MIB))
        with client.files.with_streaming_response.content(file.id) as content:
            assert sum(map(len, content.iter_bytes())) == 128 * MIB
        assert sum(map(rss_mib, pids)) - before < 64


def test_a_server_without_a_file_store_says_so(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        answer = requests.get(gateway.url + FILES, timeout=20)
    assert "see --file-store" in error_of(answer, 404)["message"]
