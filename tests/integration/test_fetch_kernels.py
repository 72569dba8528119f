"""A library of kernels is fetched with a real pip: completely and verified, or not at all, and
without the rest of its package if the server sends parts of files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from tests.support.package_index import MEMBER, PACKAGE, VERSION, PackageIndex, wheel_with
from tools.__main__ import main
from tools.failure import Failure
from tools.libraries import remote_wheel
from tools.libraries.catalogue import (
    DEFAULT_LIBRARY,
    LIBRARIES,
    MACHINE,
    LibraryEntry,
    library_folder,
)
from tools.libraries.fetch import fetch_library
from tools.libraries.remote_wheel import NoRanges, RangeFile, fetch_member
from tools.models.fetch import home
from tools.models.wheel_file import WheelFile
from tools.processes.topology import with_model
from worker.attention.flash_library import FA2_OPERATOR, FA3_OPERATOR

CONTENT = random.Random(0).randbytes(40_000)
WHEEL = wheel_with(CONTENT, before=random.Random(1).randbytes(400_000))
ENTRY = LibraryEntry(
    name="tide",
    description="a library",
    licence="Apache-2.0",
    package=PACKAGE,
    version=VERSION,
    wheel_bytes=len(WHEEL),
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member=MEMBER,
    file_bytes=len(CONTENT),
    file_sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.models.download.RETRY_S", 0.0)
    monkeypatch.setattr(remote_wheel, "CHUNK_BYTES", 4096)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """Return an index that is the only one of pip."""
    with PackageIndex(WHEEL).serve() as served:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield served


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file()}


def fetch(index: PackageIndex, cache: Path, entry: WheelFile = ENTRY) -> Path:
    """Fetch the entry's file from the index's wheel, without asking pip for the URL."""
    file = cache / entry.file
    fetch_member(entry, index.wheel_url, file, lambda _: None)
    return file


# ---- With pip.
def test_only_the_librarys_part_of_the_package_is_downloaded(
    index: PackageIndex, tmp_path: Path
) -> None:
    file = fetch_library(ENTRY, tmp_path, lambda _: None)
    assert file == library_folder(tmp_path) / "_tide_C.abi3.so"
    assert file.read_bytes() == CONTENT
    assert left_in(tmp_path) == {file.name, f"{file.name}.verified", ".lock"}
    assert index.num_sent < 2 * len(CONTENT)
    index.num_sent = 0
    assert fetch_library(ENTRY, tmp_path, lambda _: None) == file
    assert index.num_sent == 0


def test_without_ranges_the_whole_package_is_downloaded(
    index: PackageIndex, tmp_path: Path
) -> None:
    index.has_ranges = False
    lines: list[str] = []
    file = fetch_library(ENTRY, tmp_path, lines.append)
    assert file.read_bytes() == CONTENT
    assert lines[0] == (
        "the server of the package does not send parts of files; "
        "downloading the whole package, 0.4 MB"
    )


def test_a_package_with_another_digest_is_refused_before_its_download(
    index: PackageIndex, tmp_path: Path
) -> None:
    index.sha256 = "0" * 64
    with pytest.raises(Failure, match=f"{PACKAGE} {VERSION} is not the expected file: sha256 0000"):
        fetch_library(ENTRY, tmp_path, lambda _: None)
    assert index.num_sent == 0
    assert left_in(tmp_path) == {".lock"}


def test_a_package_that_the_index_lacks_is_reported_with_pips_message(
    index: PackageIndex, tmp_path: Path
) -> None:
    gone = dataclasses.replace(ENTRY, package="tide-is-gone")
    with pytest.raises(Failure, match=r"cannot download tide: .*tide-is-gone==1\.0") as failure:
        fetch_library(gone, tmp_path, lambda _: None)
    assert "\n" not in str(failure.value)


# ---- Parts of a wheel.
@pytest.mark.parametrize("fault", ["num_cut", "num_errors"])
def test_a_response_that_fails_is_requested_again(
    index: PackageIndex, tmp_path: Path, fault: str
) -> None:
    setattr(index, fault, 3)
    assert fetch(index, tmp_path).read_bytes() == CONTENT


def test_a_server_that_keeps_failing_is_given_up(index: PackageIndex, tmp_path: Path) -> None:
    index.num_cut = 1000
    with pytest.raises(Failure, match=r"download of tide was interrupted \(.*\); try again"):
        fetch(index, tmp_path)
    assert left_in(tmp_path) == set()


def test_a_library_with_another_digest_is_refused_and_removed(
    index: PackageIndex, tmp_path: Path
) -> None:
    forged = dataclasses.replace(ENTRY, file_sha256="0" * 64)
    with pytest.raises(Failure, match=r"_tide_C\.abi3\.so is not the expected file: sha256"):
        fetch(index, tmp_path, forged)
    assert left_in(tmp_path) == set()


def test_a_library_of_another_size_is_not_unpacked(index: PackageIndex, tmp_path: Path) -> None:
    larger = dataclasses.replace(ENTRY, file_bytes=len(CONTENT) - 1)
    with pytest.raises(Failure, match="not the expected file: 40000 bytes"):
        fetch(index, tmp_path, larger)


def test_a_package_without_the_library_is_refused(index: PackageIndex, tmp_path: Path) -> None:
    other = dataclasses.replace(ENTRY, member="tide_kernels/gone.so")
    with pytest.raises(Failure, match=r"is not the expected file: .*gone\.so"):
        fetch(index, tmp_path, other)


@pytest.mark.parametrize("damaged", ["contents", "library"])
def test_a_damaged_package_is_refused(index: PackageIndex, tmp_path: Path, damaged: str) -> None:
    place = len(WHEEL) - 10 if damaged == "contents" else WHEEL.index(MEMBER.encode()) + 5000
    index.wheel = WHEEL[:place] + bytes([WHEEL[place] ^ 1]) + WHEEL[place + 1 :]
    with pytest.raises(Failure, match="is not the expected file"):
        fetch(index, tmp_path)
    assert left_in(tmp_path) == set()


def test_a_file_of_another_size_is_not_read(index: PackageIndex) -> None:
    index.is_other_size = True
    with pytest.raises(NoRanges, match="sends another file than expected"):
        RangeFile(index.wheel_url, len(WHEEL))


def test_a_package_that_is_not_on_a_web_server_is_not_read_in_parts(tmp_path: Path) -> None:
    with pytest.raises(NoRanges, match="not on a web server"):
        fetch_member(ENTRY, "file:///shelf/tide.whl", tmp_path / "file", lambda _: None)


def test_a_server_that_refuses_is_not_read_in_parts(index: PackageIndex) -> None:
    with pytest.raises(NoRanges, match="cannot be read directly: HTTP Error 404"):
        RangeFile(f"{index.url}/gone", 1)


# ---- The command.
def test_every_library_has_digests() -> None:
    assert DEFAULT_LIBRARY in LIBRARIES
    for name, entry in LIBRARIES.items():
        assert entry.name == name
        for digest in (entry.wheel_sha256, entry.file_sha256):
            assert len(bytes.fromhex(digest)) == hashlib.sha256().digest_size


def test_a_worker_searches_the_files_where_the_command_stores_them() -> None:
    assert LIBRARIES["fa3"].file == FA3_OPERATOR.file
    assert LIBRARIES["fa2"].file == FA2_OPERATOR.file
    engine = EngineConfig(address="ipc://engine", worker=WorkerConfig(model="tide"))
    worker = with_model(engine, Path("/tide.gguf")).worker
    assert worker.libraries == str(library_folder(home()))


def test_the_command_prints_the_path(
    tmp_path: Path,
    index: PackageIndex,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: MACHINE)
    monkeypatch.setitem(LIBRARIES, DEFAULT_LIBRARY, ENTRY)
    assert main(["fetch-kernels"]) == 0
    assert capsys.readouterr().out == f"{library_folder(tmp_path) / ENTRY.file}\n"


def test_another_processor_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert main(["fetch-kernels", "fa2"]) == 1
    assert capsys.readouterr().err == "tidegate: fa2 is only built for x86_64, not for aarch64\n"
