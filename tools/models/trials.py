"""Remembers which tokenizers have passed their trial on this machine.

The trial of a tokenizer (`gateway/text/trial.py`) takes two processes and most of a second of CPU
time. A tokenizer that has passed it passes it again, so a server's later starts skip it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from importlib import metadata
from pathlib import Path


class PassedTrials:
    """A directory with a file for each model: the digest of a passed trial.

    The digest covers the tokenizer, the code of the trial, and the version of the library
    `tokenizers`. If one of them changes, the tokenizer is tried again. If the directory
    cannot be written to, nothing is stored.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def is_expected(self, model: str) -> bool:
        """Return whether any tokenizer of the model at the path `model` has passed. It may have
        changed since then."""
        return self._file(model).exists()

    def has_passed(self, model: str, tokenizer: bytes) -> bool:
        """Return whether this tokenizer of the model has passed.

        tokenizer   the bytes of its tokenizer.json
        """
        try:
            return self._file(model).read_text() == _digest(tokenizer)
        except (OSError, UnicodeDecodeError):
            return False

    def add(self, model: str, tokenizer: bytes) -> None:
        """Store that this tokenizer of the model has passed."""
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file(model).write_text(_digest(tokenizer))

    def _file(self, model: str) -> Path:
        return self._directory / hashlib.sha256(model.encode(errors="surrogateescape")).hexdigest()


def _digest(tokenizer: bytes) -> str:
    """Return the digest of the trial of `tokenizer` with the installed code and library."""
    spec = importlib.util.find_spec("gateway")
    assert spec is not None
    assert spec.origin is not None
    code = (Path(spec.origin).parent / "text" / "trial.py").read_bytes()
    library = metadata.version("tokenizers")
    parts = (hashlib.sha256(part).digest() for part in (tokenizer, code, library.encode()))
    return hashlib.sha256(b"".join(parts)).hexdigest()
