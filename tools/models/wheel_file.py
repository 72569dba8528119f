"""A file inside a package on the Python index."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """A file inside a package on the Python index. Digests are SHA-256, in hex."""

    #: The name that users give.
    name: str
    #: Licence of the file, as an SPDX expression.
    licence: str
    #: Package on the Python index.
    package: str
    #: Exact version of the package.
    version: str
    #: Size of the package's wheel.
    wheel_bytes: int
    #: Digest of the wheel.
    wheel_sha256: str
    #: Path of the file inside the wheel.
    member: str
    #: Size of the file.
    file_bytes: int
    #: Digest of the file.
    file_sha256: str

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]
