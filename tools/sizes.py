"""Sizes as text. This module imports nothing, so it is usable before Tidegate is installed."""

from __future__ import annotations


def format_size(size: int) -> str:
    """Return a size in bytes as text: "1.5 GB", "93 MB", "0.3 MB"."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"
