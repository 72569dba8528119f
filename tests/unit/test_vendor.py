"""The files of other projects in the web page are those that npm publishes, with their licences."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from gateway.web.vendor import DIGESTS, PACKAGES, VENDOR, NpmPackage, VendorError, unpacked
from tests.support.processes import ROOT

RECORDED = {
    name: digest
    for digest, _, name in (
        line.partition("  ") for line in DIGESTS.read_text(encoding="utf-8").splitlines()
    )
}


def test_the_files_are_those_of_the_packages() -> None:
    named = {f"{package.folder}/{name}" for package in PACKAGES for name in package.files}
    found = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    assert found == named


def test_no_file_was_changed_after_it_was_copied() -> None:
    digests = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file()
    }
    assert digests == RECORDED


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_has_its_licence(package: NpmPackage) -> None:
    text = (VENDOR / package.folder / "LICENSE").read_text(encoding="utf-8")
    assert "Copyright" in text or "Apache License" in text
    patterns = [line.strip() for line in (ROOT / "setup.cfg").read_text().splitlines()]
    licences = {path for pattern in patterns if "LICENSE" in pattern for path in ROOT.glob(pattern)}
    assert VENDOR / package.folder / "LICENSE" in licences, "setup.cfg: license_files"


def archive_with(path: Path, **files: bytes) -> str:
    """Write an archive as npm packs it, and return its integrity."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return f"sha512-{base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()}"


def package_with(integrity: str, source: str = "code") -> NpmPackage:
    return NpmPackage("some", "1.2.3", integrity, "folder", {"script.js": source})


def test_the_files_of_an_archive_are_taken_by_name(tmp_path: Path) -> None:
    integrity = archive_with(tmp_path / "a.tgz", code=b"1;", other=b"2;")
    found = unpacked(package_with(integrity), tmp_path / "a.tgz")
    assert found == {"folder/script.js": b"1;"}


def test_another_archive_of_the_same_version_is_refused(tmp_path: Path) -> None:
    reviewed = archive_with(tmp_path / "a.tgz", code=b"1;")
    archive_with(tmp_path / "b.tgz", code=b"evil;")
    with pytest.raises(VendorError, match=r"some 1\.2\.3 has the integrity sha512-.*, not sha512-"):
        unpacked(package_with(reviewed), tmp_path / "b.tgz")


def test_a_file_that_the_package_lacks_is_named(tmp_path: Path) -> None:
    integrity = archive_with(tmp_path / "a.tgz", code=b"1;")
    with pytest.raises(VendorError, match=r"some 1\.2\.3 has no file missing"):
        unpacked(package_with(integrity, source="missing"), tmp_path / "a.tgz")
