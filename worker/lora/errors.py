"""Errors of adapters that cannot be loaded."""

from __future__ import annotations

from worker.errors import UnusableModel


class UnusableAdapter(UnusableModel):
    """The adapter's files are missing, damaged, or need an unsupported feature."""

    code = "unusable_adapter"


class MissingAdapter(UnusableAdapter):
    """There is no adapter at this path, or it is not in a directory from which adapters may be
    loaded. The two are not distinguished, so that a path does not show which files exist."""

    code = "missing_adapter"
