"""The number types in the names of GGUF files: "pool-Q4_K_M.gguf", "mmproj-pool-f16.gguf"."""

from __future__ import annotations

import re

NUMBER_TYPE = re.compile(
    r"(?<![A-Za-z0-9])"
    r"((?:UD-)?[IT]?Q\d[A-Z0-9_]*|MXFP4(?:_[A-Z0-9_]+)?|BF16|FP?16|FP?32)"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
"""Matches a number type as a whole word. Case is ignored."""
