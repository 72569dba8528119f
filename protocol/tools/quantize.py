"""Messages between `tidegate quantize` and the worker process that writes the file.

The tool starts `python -m worker.quantize JSON` (a QuantizeJob) and reads one JSON object per line
from it: a QuantizeProgress after each tensor.
"""

from __future__ import annotations

import msgspec

TYPES = ("Q4_K_M", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Types of GGUF files that can be written; the first one is the default."""


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Tool -> worker. Write the model in a directory as a GGUF file.

    type   one of TYPES
    """

    model: str
    output: str
    type: str


class QuantizeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Worker -> tool. How much of the file has been written."""

    #: Name of the tensor that was written last.
    tensor: str
    written_bytes: int
    total_bytes: int
