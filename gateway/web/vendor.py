"""The files of other projects that the web page loads: copies, as npm publishes them.

    python -m gateway.web.vendor

It needs npm, replaces `static/vendor/` with the files of the versions named here, and writes their
digests to `vendor.sha256`, which `sha256sum -c` reads in `static/vendor/`. The page loads a file of
these only when a message needs it: for a formula or a block of code. Each folder has its licence.

For a new version, change the version and the integrity, which `npm view NAME@VERSION` shows, and
review what the project has changed.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.web.files import STATIC

VENDOR = STATIC / "vendor"
DIGESTS = Path(__file__).with_name("vendor.sha256")

KATEX_FONTS = (
    *("AMS-Regular", "Caligraphic-Bold", "Caligraphic-Regular", "Fraktur-Bold", "Fraktur-Regular"),
    *("Main-Bold", "Main-BoldItalic", "Main-Italic", "Main-Regular", "Math-BoldItalic"),
    *("Math-Italic", "SansSerif-Bold", "SansSerif-Italic", "SansSerif-Regular", "Script-Regular"),
    *("Size1-Regular", "Size2-Regular", "Size3-Regular", "Size4-Regular", "Typewriter-Regular"),
)

LANGUAGES = (
    *("bash", "c", "cpp", "csharp", "css", "diff", "dockerfile", "go", "ini", "java"),
    *("javascript", "json", "kotlin", "lua", "makefile", "markdown", "php", "python", "r", "ruby"),
    *("rust", "scala", "sql", "swift", "typescript", "xml", "yaml"),
)
"""The languages whose code has colours, as highlight.js names their files."""


class VendorError(Exception):
    """A package could not be downloaded, or is not the one that was reviewed."""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package of npm, and the files of it that the page has."""

    name: str
    version: str
    #: SHA-512 of the archive, as npm writes it.
    integrity: str
    #: Folder in `static/vendor/`.
    folder: str
    #: Path in the folder -> path in the package.
    files: Mapping[str, str]


PACKAGES = (
    NpmPackage(
        name="katex",
        version="0.19.1",
        integrity="sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        folder="katex",
        files={
            "LICENSE": "LICENSE",
            "katex.min.css": "dist/katex.min.css",
            "katex.min.js": "dist/katex.min.js",
            **{
                f"fonts/KaTeX_{name}.woff2": f"dist/fonts/KaTeX_{name}.woff2"
                for name in KATEX_FONTS
            },
        },
    ),
    NpmPackage(
        name="@highlightjs/cdn-assets",
        version="11.12.0",
        integrity="sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        folder="highlight",
        files={
            "LICENSE": "LICENSE",
            "core.min.js": "es/core.min.js",
            **{f"languages/{name}.min.js": f"es/languages/{name}.min.js" for name in LANGUAGES},
        },
    ),
)


def download(package: NpmPackage) -> dict[str, bytes]:
    """Return the content of the package's files by their path below `static/vendor/`. Raises
    VendorError."""
    with tempfile.TemporaryDirectory() as folder:
        asked = ["npm", "pack", f"{package.name}@{package.version}", "--pack-destination", folder]
        try:
            subprocess.run(asked, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise VendorError("npm is not installed") from error
        except subprocess.CalledProcessError as error:
            raise VendorError(error.stderr.strip()) from error
        (archive,) = Path(folder).iterdir()
        return unpacked(package, archive)


def unpacked(package: NpmPackage, archive: Path) -> dict[str, bytes]:
    """Return the content of the package's files by their path below `static/vendor/`. Raises
    VendorError if the archive is not the one whose digest `package` has, or lacks a file."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != package.integrity:
        raise VendorError(
            f"{package.name} {package.version} has the integrity sha512-{digest}, "
            f"not {package.integrity}"
        )
    found = {}
    with tarfile.open(archive) as members:
        for name, source in package.files.items():
            try:
                member = members.extractfile(f"package/{source}")
            except KeyError as error:
                raise VendorError(
                    f"{package.name} {package.version} has no file {source}"
                ) from error
            if member is None:
                raise VendorError(f"{package.name} {package.version}: {source} is not a file")
            found[f"{package.folder}/{name}"] = member.read()
    return found


def main() -> None:
    try:
        files = {name: data for package in PACKAGES for name, data in download(package).items()}
    except VendorError as error:
        raise SystemExit(f"the files were not changed: {error}") from error
    shutil.rmtree(VENDOR, ignore_errors=True)
    for name, data in files.items():
        path = VENDOR / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    DIGESTS.write_text("".join(lines), encoding="utf-8")
    print(f"{len(files)} files, {sum(map(len, files.values())):,} bytes")


if __name__ == "__main__":
    main()
